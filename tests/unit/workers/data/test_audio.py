"""Audio of a row: WAV files, their content and lists of samples are the same samples."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kit.worlds.encoder_worlds import write_wave
from shoal_workers.data.audio import decode_audio, store_audio
from shoal_workers.data.errors import BadRowError, MissingTextError

RATE = 16_000
_SOUND = np.sin(np.arange(1600) / 7) * 0.5


def _read(value: Any, file: Path, most_s: float = 1.0) -> Any:
    return decode_audio(store_audio(value, str(file), RATE, most_s, "row 3"), RATE, "audio")


@pytest.mark.parametrize(("width", "tolerance"), [(1, 1e-2), (2, 4e-5), (3, 2e-7), (4, 1e-7)])
def test_wave_files_of_each_width_are_read(tmp_path: Path, width: int, tolerance: float) -> None:
    write_wave(tmp_path / "sound.wav", _SOUND, width=width)
    row = tmp_path / "rows.jsonl"
    found = _read("sound.wav", row)
    assert found.dtype == np.float32 and found.shape == (1600,)
    assert np.abs(found - _SOUND).max() < tolerance
    content = (tmp_path / "sound.wav").read_bytes()
    for value in (content, {"bytes": content, "path": None}, {"path": str(tmp_path / "sound.wav")}):
        assert np.array_equal(_read(value, row), found)


def test_channels_are_averaged(tmp_path: Path) -> None:
    both = np.stack([_SOUND, np.zeros_like(_SOUND)], 1).reshape(-1)
    write_wave(tmp_path / "sound.wav", both, channels=2)
    assert np.abs(_read("sound.wav", tmp_path / "rows.jsonl") - _SOUND / 2).max() < 4e-5


def test_lists_of_samples_are_kept_as_they_are(tmp_path: Path) -> None:
    for value in (_SOUND.tolist(), {"array": _SOUND.tolist(), "sampling_rate": RATE, "path": None}):
        assert np.array_equal(_read(value, tmp_path), _SOUND.astype(np.float32))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3, r"row 3: data\.audio_field is int, not audio\. Write WAV files"),
        (None, "is NoneType, not audio"),
        ("missing.wav", r"missing\.wav' cannot be read: No such file"),
        ("https://example.com/a.wav", "is not a local file"),
        (b"fLaC", r"row 3 is not a WAV file of PCM samples"),
        (["a"], "is a list, and not of numbers"),
        ([[0.0, 1.0]], r"has the shape \[1, 2\]"),
        ({"array": [0.0], "sampling_rate": 8000}, "row 3 has 8000 samples per second, and the model reads 16000"),
        ([0.0] * 20_000, r"row 3 has 1\.2 s of audio, and the model reads up to 1 s"),
        ([], r"row 3 has 0\.0 s of audio"),
        (
            [120, -32768, 7],
            r"row 3: data\.audio_field is a list of int64 up to 32768, .* Divide them: samples of 16 bits",
        ),
        ([0, 1, 0, -1], r"is a list of int64 up to 1, and samples are between -1 and 1"),
        ([0.5, 12000.0], r"is a list of float64 up to 12000"),
        ({"array": [3, 4], "sampling_rate": RATE}, "is a list of int64"),
    ],
)
def test_what_a_model_cannot_read_is_named(tmp_path: Path, value: Any, words: str) -> None:
    with pytest.raises(BadRowError, match=words):
        _read(value, tmp_path / "rows.jsonl")


def test_another_rate_and_a_file_that_has_changed_are_named(tmp_path: Path) -> None:
    write_wave(tmp_path / "sound.wav", _SOUND, rate=8000)
    with pytest.raises(BadRowError, match=r"has 8000 samples per second.*sox IN -r 16000 OUT"):
        _read("sound.wav", tmp_path / "rows.jsonl")
    write_wave(tmp_path / "sound.wav", _SOUND)
    stored = store_audio("sound.wav", str(tmp_path / "rows.jsonl"), RATE, 1.0, "row 3")
    write_wave(tmp_path / "sound.wav", _SOUND[:100])
    with pytest.raises(MissingTextError, match=r"sound\.wav has changed: it had 3244 bytes, and has 244"):
        decode_audio(stored, RATE, "audio")


def test_a_wave_file_is_read_whole_or_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    write_wave(tmp_path / "sound.wav", _SOUND)
    content = (tmp_path / "sound.wav").read_bytes()
    taken = []
    for cut in (*range(0, len(content), 53), len(content) - 1):
        for value in (content[:cut], "cut.wav"):
            (tmp_path / "cut.wav").write_bytes(content[:cut])
            try:
                _read(value, tmp_path / "rows.jsonl")
                taken.append((cut, type(value)))
            except BadRowError as error:
                assert "row 3" in str(error) or "cut.wav" in str(error)
    assert taken == []
    with pytest.raises(BadRowError, match=r"is cut: its header names 3,200 bytes of samples, and it has 3,100"):
        _read(content[:-100], tmp_path / "rows.jsonl")


def test_whole_numbers_that_are_silence_and_floats_a_little_above_1_are_read(tmp_path: Path) -> None:
    assert not _read([0, 0, 0], tmp_path).any()
    assert _read([0, 0.5, 1.05], tmp_path).tolist() == pytest.approx([0, 0.5, 1.05])

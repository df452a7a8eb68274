"""Reads the audio of a row: WAV files, their content, or lists of numbers; stores it compactly, and makes samples.

    value of a row  ->  stored: a tag and the content, or the path of a file  ->  (N,) fp32 between -1 and 1, mono

The standard library reads WAV (PCM of 8, 16, 24 and 32 bits; channels are averaged). A file with fewer samples than
its header states is refused. A list of integers is refused too, because it probably has samples of 16 bits. Nothing is
resampled: the rate must be that of the model. In all functions `place` names the row in messages.
"""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal_workers.data.errors import BadRowError
from shoal_workers.data.labelled import read_unchanged
from shoal_workers.data.remote import is_url

_FILE, _WAVE, _SAMPLES = b"p", b"w", b"s"
"""Tags of stored audio: a path and a size, the content of a WAV file, or samples."""
_SEPARATOR = b"\0"
"""Between the path and the size of a file."""
_WAY_OUT = "Write WAV files (PCM), or lists of samples"
_OUT_OF_RANGE = 2.0
"""Float samples from here on are refused. Decoders of MP3 exceed 1 a little."""


def store_audio(value: Any, file: str, rate: int, most_s: float, place: str) -> bytes:
    """Return the audio of a row as it is stored: a tag and the content.

    Args:
        file: file of the row; a path in `value` is relative to its directory.
        rate: samples per second that the model reads.
        most_s: seconds of audio that the model reads.

    Raises:
        BadRowError: the value is no audio, has another rate, or is longer.
    """
    if isinstance(value, dict):
        _check_rate(value.get("sampling_rate") or rate, rate, place)
        value = next((value[key] for key in ("bytes", "array", "path") if value.get(key) is not None), None)
    match value:
        case bytes():
            audio = _WAVE + value
        case str():
            audio = _FILE + _path_and_size(value, file, place)
        case list():
            audio = _SAMPLES + _read_list(value, place).tobytes()
        case _:
            raise BadRowError(f"{place}: data.audio_field is {type(value).__name__}, not audio. {_WAY_OUT}.")
    seconds = len(decode_audio(audio, rate, place)) / rate
    if not 0 < seconds <= most_s:
        raise BadRowError(f"{place} has {seconds:.1f} s of audio, and the model reads up to {most_s:g} s. Cut it.")
    return audio


def decode_audio(stored: bytes, rate: int, place: str) -> NDArray[Any]:
    """Return the samples of stored audio: (N,) fp32 between -1 and 1, mono.

    Raises:
        BadRowError: a file is no WAV file of this rate.
        MissingTextError: a file no longer exists, or has changed.
    """
    tag, content = stored[:1], stored[1:]
    if tag == _SAMPLES:
        return np.frombuffer(content, "<f4")
    if tag == _FILE:
        content, place = _read_file(content)
    return _decode_wave(content, rate, place)


def _path_and_size(value: str, file: str, place: str) -> bytes:
    if is_url(value) or is_url(file):
        raise BadRowError(f"{place}: the audio {value!r} is not a local file. Put the content of it into the row.")
    path = Path(file).parent / Path(value).expanduser()
    try:
        return str(path).encode() + _SEPARATOR + str(path.stat().st_size).encode()
    except OSError as error:
        raise BadRowError(f"{place}: the audio {str(path)!r} cannot be read: {error.strerror}.") from error


def _read_file(path_and_size: bytes) -> tuple[bytes, str]:
    """Return the content of a stored file, and its path for messages."""
    name, _, size = path_and_size.partition(_SEPARATOR)
    path = Path(name.decode())
    return read_unchanged(path, int(size)), str(path)


def _read_list(value: list[Any], place: str) -> NDArray[Any]:
    try:
        numbers = np.asarray(value)
        samples = numbers.astype("<f4")
    except (TypeError, ValueError) as error:
        raise BadRowError(f"{place}: data.audio_field is a list, and not of numbers: {error}. {_WAY_OUT}.") from error
    if samples.ndim != 1 or not np.isfinite(samples).all():
        raise BadRowError(
            f"{place}: data.audio_field has the shape {list(samples.shape)}. Samples are one list of numbers."
        )
    loudest = float(np.abs(samples).max(initial=0))
    if loudest >= _OUT_OF_RANGE or (loudest and numbers.dtype.kind in "iu"):
        raise BadRowError(
            f"{place}: data.audio_field is a list of {numbers.dtype.name} up to {loudest:g}, and samples are between "
            "-1 and 1. Divide them: samples of 16 bits by 32768."
        )
    return samples


def _decode_wave(content: bytes, rate: int, place: str) -> NDArray[Any]:
    try:
        with wave.open(io.BytesIO(content)) as file:
            _check_rate(file.getframerate(), rate, place)
            width, channels = file.getsampwidth(), file.getnchannels()
            num_bytes = file.getnframes() * width * channels
            frames = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise BadRowError(f"{place} is not a WAV file of PCM samples ({error}). {_WAY_OUT}.") from error
    if len(frames) != num_bytes:
        raise BadRowError(
            f"{place} is cut: its header names {num_bytes:,} bytes of samples, and it has {len(frames):,}. {_WAY_OUT}."
        )
    sample_bytes = np.frombuffer(frames, np.uint8).reshape(-1, width)
    if width == 1:
        samples = (sample_bytes[:, 0].astype(np.float32) - 128) / 128
    else:
        wide = np.zeros((len(sample_bytes), 4), np.uint8)
        wide[:, 4 - width :] = sample_bytes  # the high bytes, so that the sign is right
        samples = (wide.view("<i4")[:, 0] / np.float64(1 << 31)).astype(np.float32)
    mono: NDArray[Any] = samples.reshape(-1, channels).mean(1, dtype=np.float32)
    return mono


def _check_rate(actual: int, rate: int, place: str) -> None:
    if actual != rate:
        raise BadRowError(
            f"{place} has {actual} samples per second, and the model reads {rate}. Resample it (sox IN -r {rate} OUT)."
        )

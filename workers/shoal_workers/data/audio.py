"""Audio of a row, as it is kept on disk and as samples: WAV files, their content, or lists of numbers.

    value of a row  ->  stored: a tag and the content, or the path of a file  ->  (N,) fp32 between -1 and 1, mono

WAV is read by the standard library (PCM of 8, 16, 24 and 32 bits; channels are averaged). A file with fewer samples
than its header names is refused, and so is a list of whole numbers: they are samples of 16 bits. Nothing is resampled:
the rate must be that of the model. Called by the task for speech.
"""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal_workers.data.errors import BadRowError, MissingTextError
from shoal_workers.data.remote import is_url

_FILE, _WAVE, _SAMPLES = b"p", b"w", b"s"
_SIZE = b"\0"
_WAY_OUT = "Write WAV files (PCM), or lists of samples"
_OUT_OF_RANGE = 2.0
"""A float sample may exceed 1 a little, as decoders of MP3 leave it."""


def stored_audio(value: Any, file: str, rate: int, most_s: float, place: str) -> bytes:
    """What is kept of the audio of a row.

    Args:
        file: that of the row; a path is relative to its directory.
        rate: samples per second that the model reads.
        most_s: seconds that it reads.

    Raises:
        BadRowError: it is no audio, has another rate, or is longer.
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
            audio = _SAMPLES + _array(value, place).tobytes()
        case _:
            raise BadRowError(f"{place}: data.audio_field is {type(value).__name__}, not audio. {_WAY_OUT}.")
    seconds = len(samples_of(audio, rate, place)) / rate
    if not 0 < seconds <= most_s:
        raise BadRowError(f"{place} has {seconds:.1f} s of audio, and the model reads up to {most_s:g} s. Cut it.")
    return audio


def samples_of(stored: bytes, rate: int, place: str) -> NDArray[Any]:
    """(N,) fp32.

    Raises:
        BadRowError: a file is no WAV file of this rate.
        MissingTextError: a file is not there any more, or has changed.
    """
    tag, content = stored[:1], stored[1:]
    if tag == _SAMPLES:
        return np.frombuffer(content, "<f4")
    if tag == _FILE:
        content, place = _read(content)
    return _of_wave(content, rate, place)


def _path_and_size(value: str, file: str, place: str) -> bytes:
    if is_url(value) or is_url(file):
        raise BadRowError(f"{place}: the audio {value!r} is not a local file. Put the content of it into the row.")
    path = Path(file).parent / Path(value).expanduser()
    try:
        return str(path).encode() + _SIZE + str(path.stat().st_size).encode()
    except OSError as error:
        raise BadRowError(f"{place}: the audio {str(path)!r} cannot be read: {error.strerror}.") from error


def _read(content: bytes) -> tuple[bytes, str]:
    name, _, size = content.partition(_SIZE)
    path = Path(name.decode())
    try:
        start = path.read_bytes()
    except OSError as error:
        raise MissingTextError(f"{path} cannot be read: {error.strerror}.") from error
    if len(start) != int(size):
        raise MissingTextError(f"{path} has changed: it had {int(size)} bytes, and has {len(start)}. Put it back.")
    return start, str(path)


def _array(value: list[Any], place: str) -> NDArray[Any]:
    try:
        given = np.asarray(value)
        samples = given.astype("<f4")
    except (TypeError, ValueError) as error:
        raise BadRowError(f"{place}: data.audio_field is a list, and not of numbers: {error}. {_WAY_OUT}.") from error
    if samples.ndim != 1 or not np.isfinite(samples).all():
        raise BadRowError(
            f"{place}: data.audio_field has the shape {list(samples.shape)}. Samples are one list of numbers."
        )
    loudest = float(np.abs(samples).max(initial=0))
    if loudest >= _OUT_OF_RANGE or (loudest and given.dtype.kind in "iu"):
        raise BadRowError(
            f"{place}: data.audio_field is a list of {given.dtype.name} up to {loudest:g}, and samples are between -1 "
            "and 1. Divide them: samples of 16 bits by 32768."
        )
    return samples


def _of_wave(content: bytes, rate: int, place: str) -> NDArray[Any]:
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
    whole = np.frombuffer(frames, np.uint8).reshape(-1, width)
    if width == 1:
        samples = (whole[:, 0].astype(np.float32) - 128) / 128
    else:
        wide = np.zeros((len(whole), 4), np.uint8)
        wide[:, 4 - width :] = whole  # the high bytes, so that the sign is right
        samples = (wide.view("<i4")[:, 0] / np.float64(1 << 31)).astype(np.float32)
    mono: NDArray[Any] = samples.reshape(-1, channels).mean(1, dtype=np.float32)
    return mono


def _check_rate(actual: int, rate: int, place: str) -> None:
    if actual != rate:
        raise BadRowError(
            f"{place} has {actual} samples per second, and the model reads {rate}. Resample it (sox IN -r {rate} OUT)."
        )

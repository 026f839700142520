from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from tandem.weights.delta import PIECE_BYTES, Bytes, Patch, encode


def patch_of(old: Bytes, new: Bytes, *, start: int = 0) -> bytes:
    parts = []
    for at in range(0, new.size, PIECE_BYTES):
        end = at + PIECE_BYTES
        parts += encode(old[at:end], new[at:end], start=start + at)
    return b"".join(bytes(part) for part in parts)


def patched(old: Bytes, patch: bytes, folder: Path, *, start: int = 0) -> Bytes:
    (folder / "patch").write_bytes(patch)
    made = old.copy()
    for change in Patch.open_patch(folder / "patch").within(start, old.size):
        change.apply(made, start=start)
    return made


def changed(values: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """A copy with this share of its elements drawn again."""
    other = values.copy()
    chosen = rng.random(values.size) < share
    other[chosen] = rng.integers(0, 256, chosen.sum() * values.itemsize, np.uint8).view(
        values.dtype
    )
    return other


@pytest.mark.parametrize("seed", range(40))
def test_a_patch_makes_the_new_file_out_of_the_old_one(tmp_path: Path, seed: int):
    rng = np.random.default_rng(seed)
    dtype = rng.choice([np.uint8, np.uint16, np.uint32, np.uint64])
    size = int(rng.choice([1, 2, 3, 255, 1000, 2**17 + 1, 2**20 + 3]))
    old = rng.integers(0, 256, size * dtype().itemsize, np.uint8)
    share = rng.choice([0, 1e-5, 1e-3, 0.03, 0.3, 0.6, 0.9, 1])
    new = changed(old.view(dtype), share, rng).view(np.uint8)
    patch = patch_of(old, new, start=seed)
    assert np.array_equal(patched(old, patch, tmp_path, start=seed), new)
    assert len(patch) <= new.size + 16 * -(-new.size // PIECE_BYTES)
    assert bool(patch) == (not np.array_equal(old, new))


@pytest.mark.parametrize("positions", [[0], [254], [255], [256], [510], [0, 255, 511, 9_999_999]])
def test_gaps_of_every_length(tmp_path: Path, positions: list[int]):
    old = np.zeros(2 * 10_000_000, np.uint8)
    new = old.copy()
    new.view(np.uint16)[positions] = 7
    patch = patch_of(old, new)
    assert np.array_equal(patched(old, patch, tmp_path), new)
    assert len(patch) < 16 * 2 + 3 * len(positions) + PIECE_BYTES // 2 // 255 + 2


def test_where_little_changes_a_patch_takes_three_bytes_for_each_word():
    rng = np.random.default_rng(1)
    old = np.zeros(8 * PIECE_BYTES, np.uint8)
    new = old.copy()
    words = new.view(np.uint16)
    words[rng.random(words.size) < 0.03] = 1
    assert len(patch_of(old, new)) / new.size == pytest.approx(0.03 * 3 / 2, rel=0.02)
    assert patch_of(old, old) == b""


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda patch: patch[:-1], "ends within a change"),
        (lambda patch: patch + b"\0" * 5, "ends within a header"),
        (lambda patch: patch + patch, "not in order"),
        (lambda patch: patch[:16] + b"\xfe\x01" + patch[18:], "beyond the end"),
        (lambda patch: patch[:16] + b"\xff" + patch[17:], "as many positions as values"),
        (lambda patch: struct.pack("<QII", 0, 0, 200) + b"\0" * 200, "beyond the end"),
        (lambda patch: struct.pack("<QII", 0, 1, 1) + b"\0" * 2, "half a value"),
    ],
)
def test_what_is_no_patch_of_the_file_is_refused(tmp_path: Path, damage, why: str):
    old = np.zeros(100, np.uint8)
    new = old.copy()
    new[[2, 40]] = 1
    with pytest.raises(ValueError, match=why):
        patched(old, damage(patch_of(old, new)), tmp_path)

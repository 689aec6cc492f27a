"""Penalties as files: the same to the bit, or a clear error; never half a file."""

import json
import os
import pickletools
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

import holdfast as hf
from holdfast import storage
from holdfast.matrices import MATRICES
from holdfast.storage import FileError

# One approximation per representation of a matrix: a new one needs a row.
REPRESENTED: dict[str, hf.Approximation] = {
    "diagonal": hf.Diagonal(),
    "block_diagonal": hf.BlockDiagonal(size=5),
    "factored": hf.CountSketch(size=3),
    "dense": hf.Full(),
    "kronecker": hf.Kronecker(),
    "sum": hf.DiagonalPlusLowRank(rank=2, group=3),
    "parts": hf.Composite({"*.bias": hf.Full(), "*": hf.DiagonalPlusLowRank(rank=2, group=3)}),
}


def own_potential(outputs: Tensor, batch: object) -> Tensor:
    return outputs.square().sum(1)


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def data(dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 3, generator=generator).to(dtype)
    return [(x, torch.arange(12) % 2)]


def penalty_of(
    approximation: hf.Approximation,
    *,
    importance: hf.Importance | None = None,
    anchor: str = "latest",
    tasks: int = 1,
    dtype: torch.dtype = torch.float32,
) -> hf.Penalty:
    regularizer = hf.Regularizer(
        importance or hf.EWC(),
        approximation,
        strength=123.456,
        history=hf.MovingAverage(new=0.3),
        anchor=anchor,  # type: ignore[arg-type]
    )
    model, penalty = network(dtype), None
    for _ in range(tasks):
        penalty = regularizer.consolidate(
            model, data(dtype), previous=penalty, seed=2**63 - 1, progress=False
        )
        with torch.no_grad():
            for p in model.parameters():
                p += 0.01 * torch.randn_like(p)
    assert penalty is not None
    return penalty


def moved_network(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = network(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1
    return model


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(one: hf.Penalty, two: hf.Penalty, dtype: torch.dtype = torch.float32) -> None:
    """The same value, gradient and record, bit for bit."""
    results = []
    for penalty in (one, two):
        model = moved_network(dtype)
        value = penalty(model)
        value.backward()
        grads = [bits(p.grad) for p in model.parameters() if p.grad is not None]
        results.append((bits(value), grads))
    assert results[0] == results[1]
    assert one.space == two.space
    assert one.strength == two.strength
    assert one.recipe == two.recipe
    assert one.tasks == two.tasks
    assert one.nbytes == two.nbytes
    assert type(one.matrix) is type(two.matrix)
    assert [bits(t) for t in one.offset] == [bits(t) for t in two.offset]
    for name, tensor in one.matrix.tensors.items():
        assert tensor.dtype == two.matrix.tensors[name].dtype
        assert bits(tensor) == bits(two.matrix.tensors[name])


def test_every_representation_has_a_row() -> None:
    assert REPRESENTED.keys() == MATRICES.keys()
    for name, approximation in REPRESENTED.items():
        assert type(penalty_of(approximation).matrix) is MATRICES[name]


@pytest.mark.parametrize("kind", REPRESENTED)
@pytest.mark.parametrize("anchor", ["latest", "each"])
@pytest.mark.parametrize("stored", [None, torch.bfloat16, torch.float64, torch.int8])
def test_a_loaded_penalty_is_the_same_to_the_bit(
    kind: str, anchor: str, stored: torch.dtype | None, tmp_path: Path
) -> None:
    if stored == torch.int8 and kind != "factored":
        return  # refused, as test_matrices shows
    penalty = penalty_of(REPRESENTED[kind], anchor=anchor, tasks=3).to(dtype=stored)
    assert bool(penalty.offset) == (anchor == "each")
    penalty.save(tmp_path / "penalty.safetensors")
    assert_same(penalty, hf.Penalty.load(tmp_path / "penalty.safetensors"))
    elsewhere = penalty.offload(
        tmp_path / "elsewhere"
    )  # aligned otherwise: products round otherwise
    assert_same_numbers(penalty, elsewhere)
    torch.testing.assert_close(elsewhere(network()), penalty(network()))


def assert_same_numbers(one: hf.Penalty, two: hf.Penalty) -> None:
    pairs = [(one.anchor, two.anchor), *zip(one.offset, two.offset, strict=True)]
    pairs += [(part, two.matrix.tensors[name]) for name, part in one.matrix.tensors.items()]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


def _own_memory() -> int:
    """Bytes of this process that are in no file."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux tells the memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_what_is_offloaded_takes_no_memory(dtype: torch.dtype, tmp_path: Path) -> None:
    """Also after steps that read all of it, which give the same gradient; a task can be added to it."""
    model = nn.Linear(1000, 1000, bias=False)
    # 80 MB whatever the precision: more than the allocator keeps back for later
    recipe = hf.Regularizer(hf.EWC(), hf.CountSketch(size=80 // dtype.itemsize))
    batches = [(torch.randn(90, 1000), torch.randint(0, 1000, (90,)))]
    penalty = recipe.consolidate(model, batches, seed=0, progress=False).to(dtype=dtype)
    torch.nn.init.normal_(model.weight)
    model.weight.grad = torch.zeros_like(model.weight)
    penalty.add_grad_(model)
    expected, size = model.weight.grad.clone(), penalty.matrix.nbytes
    model.weight.grad.zero_()
    before = _own_memory()
    elsewhere = penalty.offload(tmp_path / "penalty")
    elsewhere.add_grad_(model)
    assert _own_memory() - before < 0.5 * size
    assert torch.equal(model.weight.grad, expected)
    again = hf.Penalty.load(tmp_path / "penalty")
    assert _own_memory() - before > 0.9 * size
    assert torch.equal(again.anchor, elsewhere.anchor)
    both = recipe.consolidate(model, batches, previous=elsewhere, seed=0, progress=False)
    assert len(both.tasks) == 2
    assert_same_numbers(again, elsewhere)


def test_double_precision_and_a_function_of_ones_own(tmp_path: Path) -> None:
    penalty = penalty_of(
        hf.LowRank(rank=2), importance=hf.Custom(own_potential), tasks=2, dtype=torch.float64
    )
    penalty.save(str(tmp_path / "p"))  # any name, a string too
    loaded = hf.Penalty.load(str(tmp_path / "p"))
    assert_same(penalty, loaded, torch.float64)
    assert "own_potential" in loaded.recipe["importance"]["fn"]


def test_a_loaded_penalty_continues_the_loop(tmp_path: Path) -> None:
    regularizer = hf.Regularizer(hf.EWC(), hf.CountSketch(size=3), anchor="each")
    model = network()
    first = regularizer.consolidate(model, data(), seed=0, progress=False)
    first.save(tmp_path / "p")
    after = [
        regularizer.consolidate(moved_network(), data(), previous=p, seed=0, progress=False)
        for p in (first, hf.Penalty.load(tmp_path / "p"))
    ]
    assert_same(*after)


def test_saving_twice_gives_the_same_tensors_and_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "p"
    penalty_of(hf.Diagonal()).save(path)
    newer = penalty_of(hf.CountSketch(size=3))
    newer.save(path)
    assert_same(newer, hf.Penalty.load(path))
    assert os.listdir(tmp_path) == ["p"]


def test_a_loaded_penalty_does_not_live_in_the_file(tmp_path: Path) -> None:
    """The file may be overwritten in place; a mapped tensor would change, or crash."""
    path = tmp_path / "p"
    penalty = penalty_of(hf.Diagonal())
    penalty.save(path)
    loaded = hf.Penalty.load(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert_same(penalty, loaded)


def test_the_file_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        penalty_of(hf.Diagonal()).save(tmp_path / "p")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "p").stat().st_mode) == 0o644


def test_no_pickle_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "p"
    penalty_of(hf.CountSketch(size=3)).save(path)
    raw = path.read_bytes()
    with pytest.raises(ValueError, match="opcode"):
        list(pickletools.genops(raw))
    size = int.from_bytes(raw[:8], "little")
    assert json.loads(raw[8 : 8 + size])["__metadata__"].keys() == {"holdfast", "sha256"}


def test_no_pickle_in_the_source() -> None:
    for file in Path(hf.__file__).parent.rglob("*.py"):
        if file.name == "restricted_pickle.py":  # a data set's own format, numbers only
            continue
        text = file.read_text()
        for word in ("import pickle", "torch.load(", "torch.save(", "allow_pickle=True"):
            assert word not in text, f"{file.name}: {word}"


def test_describe_shows_what_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "p"
    penalty = penalty_of(hf.CountSketch(size=3), anchor="each", tasks=2).to(dtype=torch.bfloat16)
    penalty.save(path)
    shown = storage.describe(path)
    json.dumps(shown)
    assert shown["format"] == storage.FORMAT
    assert shown["library"] == hf.__version__
    assert shown["matrix"] == "factored"
    assert shown["parameters"][0] == ["0.weight", [4, 3]]
    assert shown["strength"] == 123.456
    assert shown["recipe"]["approximation"] == {
        "name": "count_sketch",
        "size": 3,
        "copies": 1,
        "merge": "rows",
    }
    assert [t["examples"] for t in shown["tasks"]] == [12, 12]
    assert all(len(t["hash_ids"]) == 1 for t in shown["tasks"])
    assert shown["file_bytes"] == path.stat().st_size
    assert shown["tensors"]["matrix.rows"] == {"shape": [3, 26], "dtype": "bfloat16"}
    assert shown["tensors"]["anchor"] == {"shape": [26], "dtype": "float32"}
    assert shown["intact"] is True


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "penalty.safetensors"
    penalty_of(hf.CountSketch(size=3), anchor="each", tasks=2).save(path)
    return path


def flips(raw: bytes, count: int) -> Iterator[tuple[int, int]]:
    """The length, every third byte of the header, and random places in the tensors."""
    chance = random.Random(0)
    header = 8 + int.from_bytes(raw[:8], "little")
    for i in [*range(8), *range(8, header, 3)]:
        yield i, chance.randrange(8)
    for _ in range(count):
        yield chance.randrange(header, len(raw)), chance.randrange(8)


def test_every_flipped_bit_is_seen(written: Path, tmp_path: Path) -> None:
    raw, damaged = written.read_bytes(), tmp_path / "damaged"
    for place, bit in flips(raw, 100):
        changed = bytearray(raw)
        changed[place] ^= 1 << bit
        damaged.write_bytes(changed)
        with pytest.raises(FileError, match="damaged"):
            storage.load(damaged)


def test_a_flipped_bit_in_every_tensor_is_seen(written: Path) -> None:
    """By the digest: the file itself stays readable, and inspection says what is wrong."""
    raw = written.read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8:header])
    names = [name for name in entries if name != "__metadata__"]
    assert set(names) == {"anchor", "matrix.rows", "offset.0"}
    for name in names:
        first, last = entries[name]["data_offsets"]
        for place in (first, (first + last) // 2, last - 1):
            changed = bytearray(raw)
            changed[header + place] ^= 1
            written.write_bytes(changed)
            with pytest.raises(FileError, match=r"digest differs.*consolidate again"):
                storage.load(written)
            assert storage.describe(written)["intact"] is False


@pytest.mark.parametrize("old", [b"123.456", b"latest", b"rows", b"seed", b"0.weight"])
def test_a_header_that_says_something_else_is_seen(old: bytes, tmp_path: Path) -> None:
    """A changed value that is still valid JSON: another strength, another recipe."""
    path = tmp_path / "p"
    penalty_of(hf.LowRank(rank=2)).save(path)
    raw = path.read_bytes()
    assert old in raw
    path.write_bytes(raw.replace(old, old[:-1] + bytes([old[-1] ^ 1]), 1))
    with pytest.raises(FileError, match="damaged"):
        storage.load(path)


def test_truncated_files(written: Path) -> None:
    raw = written.read_bytes()
    for length in [0, 1, 7, 8, 9, 100, len(raw) // 2, len(raw) - 1]:
        written.write_bytes(raw[:length])
        with pytest.raises(FileError, match=r"not a readable penalty file: .*truncated"):
            storage.load(written)
    written.write_bytes(raw + b"\0")
    with pytest.raises(FileError, match="not a readable penalty file"):
        storage.load(written)


def rewritten(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    """The file at ``path`` with another header, correctly digested."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["holdfast"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
    text = json.dumps(change(header))
    metadata = {"holdfast": text, "sha256": storage.digest(text, tensors)}
    save_file(tensors, path, metadata=metadata)


def test_newer_formats_are_refused(written: Path) -> None:
    rewritten(written, lambda h: {**h, "format": 2, "library": "9.9.9"})
    for function in (storage.load, storage.describe):
        with pytest.raises(FileError, match=r"format 2, .* reads format 1; .* holdfast 9\.9\.9"):
            function(written)


@pytest.mark.parametrize("header", [[], "text", 3, {}, {"format": 1}, None])
def test_headers_of_another_kind_are_refused(written: Path, header: object) -> None:
    rewritten(written, lambda _: header)
    with pytest.raises(FileError, match=r"header (has no format version|lacks library, matrix)"):
        storage.load(written)


def _foreign(path: Path) -> None:
    save_file({"weight": torch.ones(3)}, path)


def _foreign_with_metadata(path: Path) -> None:
    save_file({"weight": torch.ones(3)}, path, metadata={"format": "pt"})


def _text(path: Path) -> None:
    path.write_text("strength: 3\n" * 100)


def _torch_file(path: Path) -> None:
    torch.save({"weight": torch.ones(3)}, path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_foreign, "a safetensors file, but not one that Penalty.save wrote"),
        (_foreign_with_metadata, "a safetensors file, but not one that Penalty.save wrote"),
        (_text, "not a readable penalty file: foreign"),
        (_torch_file, "not a readable penalty file: foreign"),
        (Path.mkdir, "a folder, not a file"),
        (lambda path: None, "no such file"),
    ],
    ids=["foreign", "foreign with metadata", "text", "pickle", "folder", "missing"],
)
def test_what_is_not_a_penalty_file(
    make: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "thing"
    make(path)
    for function in (storage.load, storage.describe, hf.Penalty.load):
        with pytest.raises(FileError, match=message) as caught:
            function(path)
        assert str(path) in str(caught.value)


def _fail(error: BaseException) -> Callable[..., None]:
    def function(*_: object, **__: object) -> None:
        raise error

    return function


def _half_written(tensors: object, name: str | os.PathLike[str], metadata: object = None) -> None:
    Path(name).write_bytes(b"half")
    raise SafetensorError("No space left on device")


@pytest.mark.parametrize(
    ("target", "failing", "error"),
    [
        ("os.replace", _fail(PermissionError("read-only folder")), PermissionError),
        ("os.fsync", _fail(OSError("disk gone")), OSError),
        ("holdfast.storage.save_file", _half_written, OSError),
        ("holdfast.storage.save_file", _fail(KeyboardInterrupt()), KeyboardInterrupt),
        ("holdfast.storage.save_file", _fail(MemoryError()), MemoryError),
    ],
)
@pytest.mark.parametrize("existing", [True, False])
def test_a_failing_write_leaves_everything_as_it_was(
    target: str,
    failing: Callable[..., None],
    error: type[BaseException],
    existing: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "p"
    old, new = penalty_of(hf.Diagonal()), penalty_of(hf.CountSketch(size=3))
    if existing:
        old.save(path)
    with monkeypatch.context() as patch:
        patch.setattr(target, failing)
        with pytest.raises(error):
            new.save(path)
    assert os.listdir(tmp_path) == (["p"] if existing else [])
    if existing:
        assert_same(old, hf.Penalty.load(path))


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.storage.save_file", _half_written)
    with pytest.raises(OSError, match=r"p could not be written: No space left on device"):
        penalty_of(hf.Diagonal()).save(tmp_path / "p")


def test_places_where_nothing_can_be_written(tmp_path: Path) -> None:
    penalty = penalty_of(hf.Diagonal())
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*missing; create it first"):
        penalty.save(tmp_path / "missing" / "p")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        penalty.save(tmp_path / "folder")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"no folder .*file"):
        penalty.save(tmp_path / "file" / "p")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_a_matrix_of_ones_own_cannot_be_saved_silently(tmp_path: Path) -> None:
    class Own(hf.DiagonalMatrix):
        """Not one of the closed set."""

    penalty = penalty_of(hf.Diagonal())
    own = hf.Penalty(penalty.space, Own(penalty.matrix.diagonal()), penalty.anchor, 1.0)
    with pytest.raises(ValueError, match=r"Own is not registered; known: diagonal, "):
        own.save(tmp_path / "p")
    assert os.listdir(tmp_path) == []

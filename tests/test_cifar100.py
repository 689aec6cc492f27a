"""CIFAR-100: names, archive, the ten-class file, and the stream made of them."""

import hashlib
import io
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from holdfast.augmentation import Augmentation
from holdfast.data import CorruptData, DataFile, MissingData, cifar100, restricted_pickle
from holdfast.data.cifar100_classes import (
    CLASSES,
    SUPERCLASSES,
    find,
    same_superclass,
    superclass_of,
)
from holdfast.streams.cifar100_shift import MEAN, STD, CIFAR100Shift, normalise

TEN = ("dolphin", "apple", "lamp", "maple_tree", "bicycle")
TEN += ("whale", "orange", "television", "willow_tree", "motorcycle")


class TestClasses:
    def test_a_hundred_in_twenty(self) -> None:
        assert len(CLASSES) == len(set(CLASSES)) == 100
        assert len(SUPERCLASSES) == 20
        assert {len(names) for names in SUPERCLASSES.values()} == {5}
        assert [find(name) for name in TEN] == [30, 0, 40, 47, 8, 95, 53, 87, 96, 48]
        assert superclass_of("willow_tree") == "trees"

    @pytest.mark.parametrize(
        ("name", "hint"),
        [
            ("dolfin", "dolphin"),
            ("willow", "willow_tree"),
            ("maple tree", "maple_tree"),
            ("trees", "it is a superclass"),
            ("qqq", "no class 'qqq'"),
        ],
    )
    def test_an_unknown_name_gets_the_nearest(self, name: str, hint: str) -> None:
        with pytest.raises(ValueError, match=hint):
            find(name)

    def test_classes_of_one_place_share_a_superclass(self) -> None:
        assert same_superclass(["dolphin", "whale"]) == "aquatic_mammals"
        with pytest.raises(ValueError, match="orange is in fruit_and_vegetables"):
            same_superclass(["dolphin", "orange"])


class Harmful:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("1 + 1",)


class Python2Pickler(pickle._Pickler):
    """Protocol 2 with byte strings, as Python 2 wrote the archive; Python 3 has no such opcode of its own."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def save_string(self, text: bytes | str) -> None:
        data = text if isinstance(text, bytes) else text.encode("ascii")
        self.write(b"T" + len(data).to_bytes(4, "little") + data)

    dispatch[bytes] = dispatch[str] = save_string


def dumps2(value: object) -> bytes:
    out = io.BytesIO()
    Python2Pickler(out, 2).dump(value)
    return out.getvalue()


class TestRestrictedPickle:
    @pytest.mark.parametrize(
        "dumps", [dumps2, lambda v: pickle.dumps(v, 3), lambda v: pickle.dumps(v, 4)]
    )
    def test_reads_arrays(self, dumps: Any) -> None:
        batch = {b"data": np.arange(12, dtype=np.uint8).reshape(3, 4), b"fine_labels": [1, 2, 3]}
        found = restricted_pickle.read(dumps(batch), "batch")
        assert found[b"fine_labels"] == [1, 2, 3]
        assert np.array_equal(found[b"data"], batch[b"data"])

    @pytest.mark.parametrize(
        "value",
        [
            Harmful(),
            {b"data": Harmful()},
            {b"data": np.array([Harmful()], dtype=object)},
            {b"data": np.zeros(2, dtype="M8[s]")},
        ],
    )
    def test_refuses_everything_else(self, value: object) -> None:
        with pytest.raises(CorruptData, match="is refused"):
            restricted_pickle.read(pickle.dumps(value, 2), "batch")

    @pytest.mark.parametrize(
        "data", [b"", b"garbage", pickle.dumps({b"a": 1}, 2)[:-3], b"\x80\x02U"]
    )
    def test_refuses_what_is_no_pickle(self, data: bytes) -> None:
        with pytest.raises(CorruptData):
            restricted_pickle.read(data, "batch")

    def test_refuses_what_is_no_dictionary(self) -> None:
        with pytest.raises(CorruptData, match="expected a dictionary, got list"):
            restricted_pickle.read(pickle.dumps([1], 2), "batch")


def batch(fine: list[int], **changes: object) -> bytes:
    """One file of the archive, as Python 2 wrote it: byte strings, protocol 2."""
    pixels = np.arange(len(fine) * 3072, dtype=np.int64).reshape(len(fine), 3072) % 251
    content = {b"data": pixels.astype(np.uint8), b"fine_labels": fine, b"coarse_labels": fine}
    content |= {key.encode(): value for key, value in changes.items()}
    return dumps2({k: v for k, v in content.items() if v is not None})


def write_archive(folder: Path, **members: bytes) -> DataFile:
    (folder / "cifar100").mkdir(parents=True, exist_ok=True)
    path = folder / "cifar100" / "archive.tar.gz"
    with tarfile.open(path, "w:gz") as out:
        for name, content in members.items():
            entry = tarfile.TarInfo(f"cifar-100-python/{name}")
            entry.size = len(content)
            out.addfile(entry, io.BytesIO(content))
    content = path.read_bytes()
    return DataFile(path.name, len(content), hashlib.sha256(content).hexdigest())


class TestArchive:
    def test_reads_the_chosen_classes(self, tmp_path: Path) -> None:
        fine = [95, 0, 30, 0]
        archive = write_archive(tmp_path, train=batch(fine), test=batch(fine[:2]))
        images = cifar100.load(("apple", "whale"), tmp_path, archive)
        assert images.train.shape == (3, 32, 32, 3)
        assert images.train_labels.tolist() == [1, 0, 0]
        assert images.test_labels.tolist() == [1, 0]
        # colour planes of 1024 in the file; channels last in memory: pixel (0, 1) of the second image
        expected = [(3072 + plane * 1024 + 1) % 251 for plane in range(3)]
        assert images.train[1, 0, 1].tolist() == expected

    def test_is_checked_before_anything_is_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        archive = write_archive(tmp_path, train=batch([0]), test=batch([0]))
        path = tmp_path / "cifar100" / archive.name
        path.write_bytes(path.read_bytes()[:-1] + b"x")

        def opened(*_: object, **__: object) -> None:
            raise AssertionError("a wrong archive was opened")

        monkeypatch.setattr(tarfile, "open", opened)
        with pytest.raises(CorruptData, match="expected SHA-256"):
            cifar100.load(("apple",), tmp_path, archive)

    @pytest.mark.parametrize(
        ("train", "message"),
        [
            (batch([0], fine_labels=None), "is not a batch of CIFAR"),
            (batch([0], data=np.zeros((1, 7), np.uint8)), "is not a batch of CIFAR"),
            (batch([0, 1], fine_labels=[0]), "expected 2 labels"),
            (batch([100]), "labels run from 0 to 99"),
            (batch([0], data=np.zeros((1, 3072), np.int64)), "expected uint8 images"),
            (pickle.dumps(Harmful(), 2), "is refused"),
        ],
    )
    def test_refuses_a_wrong_batch(self, tmp_path: Path, train: bytes, message: str) -> None:
        archive = write_archive(tmp_path, train=train, test=batch([0]))
        with pytest.raises(CorruptData, match=message):
            cifar100.load(("apple",), tmp_path, archive)

    def test_an_archive_without_the_batch(self, tmp_path: Path) -> None:
        archive = write_archive(tmp_path, train=batch([0]))
        with pytest.raises(CorruptData, match="has no cifar-100-python/test"):
            cifar100.load(("apple",), tmp_path, archive)

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(MissingData, match=r"cs\.toronto\.edu") as caught:
            cifar100.load(folder=tmp_path, fetching=False)
        assert str(tmp_path / "cifar100") in str(caught.value)
        assert cifar100.missing(tmp_path) == ["cifar-100-python.tar.gz"]

    def test_cannot_be_fetched(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        archive = DataFile("archive.tar.gz", 1, "0" * 64, ("http://127.0.0.1:9/archive.tar.gz",))
        with pytest.raises(MissingData, match="Download archive"):
            cifar100.load(("apple",), tmp_path, archive)


def arrays(per_class: int = 12) -> dict[str, np.ndarray]:
    """The content of a ten-class file, sorted by class."""
    random = np.random.default_rng(0)
    y = np.repeat(np.arange(10), per_class)
    fine = np.array([find(name) for name in TEN])[y]
    x = random.integers(0, 256, (len(y), 32, 32, 3)).astype(np.uint8)
    return {
        "x_train": x, "y_train": y, "fine_train": fine,
        "x_test": x[::2], "y_test": y[::2], "fine_test": fine[::2],
        "class_names": np.array(TEN),
    }  # fmt: skip


def write_npz(folder: Path, content: dict[str, np.ndarray]) -> Path:
    path = folder / "cifar100" / cifar100.SUBSET
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **content)
    return path


class TestTenClasses:
    def test_is_accepted_as_it_is(self, tmp_path: Path) -> None:
        content = arrays()
        write_npz(tmp_path, content)
        images = cifar100.load(("whale", "dolphin"), tmp_path, fetching=False)
        assert images.train_labels.tolist() == [1] * 12 + [0] * 12
        assert np.array_equal(images.train[12:].numpy(), content["x_train"][60:72])
        assert cifar100.missing(tmp_path) == []

    def test_other_classes_need_the_archive(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        write_npz(tmp_path, arrays())
        with pytest.raises(MissingData, match="has no beaver"):
            cifar100.load(("dolphin", "beaver"), tmp_path, fetching=False)
        closed = DataFile("archive.tar.gz", 1, "0" * 64, ("http://127.0.0.1:9/archive.tar.gz",))
        with pytest.raises(
            MissingData, match=r"cls\.npz has no beaver; the archive, .* could not"
        ):
            cifar100.load(("dolphin", "beaver"), tmp_path, closed)
        names = [path.name for path in (tmp_path / "cifar100").iterdir()]
        assert names == [cifar100.SUBSET]  # nothing else was left in a folder that was provided
        archive = write_archive(tmp_path, train=batch([4]), test=batch([4]))
        assert len(cifar100.load(("beaver",), tmp_path, archive).train) == 1

    @pytest.mark.parametrize("part", ["train", "test"])
    def test_a_class_without_images_of_a_part_is_lacking(self, part: str, tmp_path: Path) -> None:
        content = arrays()
        kept = content[f"y_{part}"] != 0
        for kind in ("x", "y", "fine"):
            content[f"{kind}_{part}"] = content[f"{kind}_{part}"][kept]
        write_npz(tmp_path, content)
        with pytest.raises(MissingData, match="has no dolphin"):
            cifar100.load(("dolphin",), tmp_path, fetching=False)
        assert len(cifar100.load(("apple",), tmp_path, fetching=False).test)

    def test_says_what_is_there_when_the_archive_cannot_be_fetched(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        write_npz(tmp_path, arrays())
        closed = DataFile("archive.tar.gz", 1, "0" * 64, ("http://127.0.0.1:9/archive.tar.gz",))
        with pytest.raises(
            MissingData, match=r"has the paper's ten classes; the archive, .* is not"
        ):
            cifar100.fetch(tmp_path, closed)

    def test_an_encrypted_member(self, tmp_path: Path) -> None:
        path = write_npz(tmp_path, arrays())
        content = bytearray(path.read_bytes())
        with zipfile.ZipFile(path) as file:
            for member in file.infolist():
                content[member.header_offset + 6] |= 1
        at = content.find(b"PK\x01\x02")
        while at >= 0:
            content[at + 8] |= 1
            at = content.find(b"PK\x01\x02", at + 1)
        path.write_bytes(content)
        with pytest.raises(
            CorruptData, match=r"cls\.npz is damaged or not an npz file .*encrypted"
        ):
            cifar100.load(TEN, tmp_path, fetching=False)

    def test_object_arrays_are_refused(self, tmp_path: Path) -> None:
        path = write_npz(tmp_path, {**arrays(), "y_train": np.array([Harmful()], dtype=object)})
        with pytest.raises(CorruptData, match="'y_train' holds Python objects") as caught:
            cifar100.load(TEN, tmp_path)
        assert str(path) in str(caught.value)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"x_train": np.zeros((120, 3, 32, 32), np.uint8)}, "expected uint8 images"),
            ({"x_test": np.zeros((60, 32, 32, 3))}, "got float64"),
            ({"fine_train": np.zeros(7, np.int64)}, "expected 120 labels"),
            ({"fine_train": np.zeros(120, np.int64)}, "contradict fine_train"),
            ({"y_test": np.full(60, 10)}, "contradict fine_test"),
            ({"y_train": np.zeros(120)}, "y_train of whole numbers, got float64"),
            ({"class_names": np.array("apple")}, "class_names to be a list of names, got <U5"),
            ({"class_names": np.arange(10)}, "class_names to be a list of names, got int64"),
            ({"class_names": np.array(["wale", *TEN[1:]])}, "class_names: CIFAR-100 has no class"),
        ],
    )
    def test_wrong_arrays(
        self, tmp_path: Path, changes: dict[str, np.ndarray], message: str
    ) -> None:
        path = write_npz(tmp_path, arrays() | changes)
        with pytest.raises(CorruptData, match=message) as caught:
            cifar100.load(TEN, tmp_path)
        assert str(path) in str(caught.value)

    def test_a_lacking_array(self, tmp_path: Path) -> None:
        content = arrays()
        del content["fine_test"]
        write_npz(tmp_path, content)
        with pytest.raises(CorruptData, match="lacks the arrays fine_test"):
            cifar100.load(TEN, tmp_path)

    @pytest.mark.parametrize("damage", [lambda b: b[:5000], lambda _: b"text", lambda _: b""])
    def test_no_npz_at_all(self, tmp_path: Path, damage: Any) -> None:
        path = write_npz(tmp_path, arrays())
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(CorruptData, match=cifar100.SUBSET):
            cifar100.load(TEN, tmp_path)

    def test_a_single_array(self, tmp_path: Path) -> None:
        path = write_npz(tmp_path, arrays())
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
        with pytest.raises(CorruptData, match=r"cls\.npz is not an npz file: it holds a single"):
            cifar100.load(TEN, tmp_path)

    def test_an_array_that_ends_too_soon(self, tmp_path: Path) -> None:
        path = write_npz(tmp_path, arrays())
        with zipfile.ZipFile(path) as whole:
            members = {name: whole.read(name) for name in whole.namelist()}
        with zipfile.ZipFile(path, "w") as out:
            for name, content in members.items():
                out.writestr(name, content[:-8] if name == "y_test.npy" else content)
        with pytest.raises(CorruptData, match=r"the array 'y_test' cannot be read"):
            cifar100.load(TEN, tmp_path)

    def test_a_flipped_bit_is_found(self, tmp_path: Path) -> None:
        path = write_npz(tmp_path, arrays())
        with zipfile.ZipFile(path) as content:
            start = content.getinfo("x_train.npy").header_offset + 5000
        data = bytearray(path.read_bytes())
        data[start] ^= 1
        path.write_bytes(data)
        with pytest.raises(CorruptData, match="damaged"):
            cifar100.load(TEN, tmp_path)

    @pytest.mark.data
    def test_the_real_file(self, real_data: Path) -> None:
        images = cifar100.load(TEN, real_data, fetching=False)
        assert images.train_labels.bincount().tolist() == [500] * 10
        assert images.test_labels.bincount().tolist() == [100] * 10


class TestStream:
    def test_default_is_the_paper(self) -> None:
        stream = CIFAR100Shift()
        assert tuple(name for task in stream.classes for name in task) == TEN

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"classes": (("dolphin",), ("apple",))}, "share a superclass"),
            ({"classes": (("dolphin",), ("wale",))}, "the nearest are whale"),
            ({"classes": (("dolphin",), ("dolphin",))}, "dolphin does not"),
            ({"classes": (("dolphin", "apple"), ("whale",))}, "equally many names"),
            ({"classes": ()}, "equally many names"),
            ({"classes": ((), ())}, "equally many names"),
            ({"augmentation": Augmentation(translate=32)}, "smaller than an image of 32 × 32"),
            ({"validation": 0}, "validation is 1 or larger"),
            ({"source": "cifar10"}, "unknown source"),
        ],
    )
    def test_refuses(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            CIFAR100Shift(**fields)

    def test_splits_do_not_overlap_and_keep_the_images_apart(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        content = arrays()
        write_npz(tmp_path, content)
        monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path))
        tasks = CIFAR100Shift(validation=3).tasks(0)
        assert [task.train.labels.bincount().tolist() for task in tasks] == [[9] * 5] * 2
        for index, task in enumerate(tasks):
            for place in range(5):
                first = (index * 5 + place) * 12
                own = task.train.inputs[task.train.labels == place]
                assert np.array_equal(own.numpy(), content["x_train"][first : first + 9])
                held = task.validation.inputs[task.validation.labels == place]
                assert np.array_equal(held.numpy(), content["x_train"][first + 9 : first + 12])
            assert task.test.labels.bincount().tolist() == [6] * 5
        small = CIFAR100Shift(validation=3, train_size=2, test_size=4).tasks(0)
        assert [len(s) for s in (small[0].train, small[0].validation, small[0].test)] == [
            10,
            15,
            20,
        ]
        with pytest.raises(ValueError, match="dolphin has 12"):
            CIFAR100Shift(validation=12).tasks(0)
        with pytest.raises(ValueError, match="train_size is at most 9 per class here, got 10"):
            CIFAR100Shift(validation=3, train_size=10).tasks(0)
        with pytest.raises(ValueError, match="test_size is at most 6 per class here, got 7"):
            CIFAR100Shift(validation=3, test_size=7).tasks(0)

    def test_reads_normalised_images_and_augments_only_with_a_generator(self) -> None:
        task = CIFAR100Shift(source="generated").tasks(0)[0]
        x, _ = next(task.train.batches(7))
        assert x.shape == (7, 3, 32, 32)
        assert x.is_contiguous(memory_format=torch.channels_last)
        stored = task.train.inputs[:7].double().permute(0, 3, 1, 2)
        mean, std = (torch.tensor(v).double().view(3, 1, 1) for v in (MEAN, STD))
        torch.testing.assert_close(x.double(), (stored - mean) / std, rtol=1e-5, atol=1e-5)
        augmented, _ = next(task.train.batches(7, generator=torch.Generator().manual_seed(0)))
        assert not torch.equal(augmented, x)
        held, _ = next(task.validation.batches(7, generator=torch.Generator().manual_seed(0)))
        assert torch.equal(held, normalise(task.validation.inputs[:7]))

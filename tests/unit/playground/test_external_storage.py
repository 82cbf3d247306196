from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from tikv_br.cluster.pb import brpb_pb2, encryptionpb_pb2
from tikv_br.playground.external_storage import CipherFault, StorageFault, crypt, open_storage

MISSING = 'Io(Os { code: 2, kind: NotFound, message: "No such file or directory" })'


def local(path: Path) -> brpb_pb2.StorageBackend:
    """A folder as a request names it."""
    return brpb_pb2.StorageBackend(local=brpb_pb2.Local(path=str(path)))


def test_local_files(tmp_path: Path) -> None:
    """A file reads as written, in folders made on demand, is replaced by a second write, and nothing else remains."""
    storage = open_storage(local(tmp_path))
    storage.write("1/x.sst", b"one")
    storage.write("1/x.sst", b"two")
    assert storage.read("1/x.sst") == b"two"
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["1", "1/x.sst"]
    assert stat.S_IMODE((tmp_path / "1/x.sst").stat().st_mode) == 0o644
    assert (storage.nested, storage.url) == (True, f"local://{tmp_path}")


def test_a_missing_folder_in_both_wordings(tmp_path: Path) -> None:
    """The folder must exist: a backup reports it in Rust's debug form, an import in its display form."""
    with pytest.raises(StorageFault) as fault:
        open_storage(local(tmp_path / "nosuch"))
    assert fault.value.debug == MISSING
    assert fault.value.display == "No such file or directory (os error 2)"
    with pytest.raises(StorageFault) as fault:
        open_storage(local(tmp_path)).read("x")
    assert fault.value.debug == MISSING


def test_backends_that_are_none(tmp_path: Path) -> None:
    """No backend, or one that the store was not built with, is refused as recorded."""
    with pytest.raises(StorageFault) as fault:
        open_storage(brpb_pb2.StorageBackend())
    assert fault.value.debug == 'Io(Custom { kind: NotFound, error: "bad storage backend " })'
    with pytest.raises(StorageFault, match="hdfs"):
        open_storage(brpb_pb2.StorageBackend(hdfs=brpb_pb2.HDFS(remote="hdfs://n/p")))
    noop = open_storage(brpb_pb2.StorageBackend(noop=brpb_pb2.Noop()))
    noop.write("x", b"forgotten")
    assert (noop.read("x"), noop.nested) == (b"", False)


def test_an_unreachable_bucket_is_a_fault_of_one_line() -> None:
    """The error keeps to one line and names no secret."""
    s3 = brpb_pb2.S3(
        endpoint="http://127.0.0.1:9", region="us-east-1", bucket="b", prefix="p", access_key="AK",
        secret_access_key="TOPSECRET", force_path_style=True,
    )  # fmt: skip
    storage = open_storage(brpb_pb2.StorageBackend(s3=s3))
    assert storage.url == "s3://b/p"
    with pytest.raises(StorageFault) as fault:
        storage.read("x")
    assert re.fullmatch(r"failed to get object .*", fault.value.display)
    assert "TOPSECRET" not in fault.value.debug


def test_ciphers_that_are_none() -> None:
    """Plain stays plain; unknown methods and keys of the wrong length are refused."""
    assert crypt(brpb_pb2.CipherInfo(), b"", b"plain") == b"plain"
    assert crypt(brpb_pb2.CipherInfo(cipher_type=encryptionpb_pb2.PLAINTEXT), b"", b"plain") == b"plain"
    with pytest.raises(CipherFault, match="not supported"):
        crypt(brpb_pb2.CipherInfo(cipher_type=encryptionpb_pb2.SM4_CTR), bytes(16), b"")
    with pytest.raises(CipherFault, match="5 bytes"):
        crypt(brpb_pb2.CipherInfo(cipher_type=encryptionpb_pb2.AES128_CTR, cipher_key=b"short"), bytes(16), b"")


@pytest.mark.parametrize("name", ["linked/x.sst", "../victim/x.sst", "link.sst"])
def test_links_lead_no_store_out_of_the_folder(tmp_path: Path, name: str) -> None:
    """The playground runs with its user's rights: it writes and reads below the folder of the request only."""
    base, victim = tmp_path / "base", tmp_path / "victim"
    base.mkdir()
    victim.mkdir()
    (victim / "x.sst").write_bytes(b"of another")
    (base / "linked").symlink_to(victim)
    (base / "link.sst").symlink_to(victim / "x.sst")
    storage = open_storage(local(base))
    with pytest.raises(StorageFault):
        storage.write(name, b"x")
    with pytest.raises(StorageFault):
        storage.read(name)
    assert [path.read_bytes() for path in victim.iterdir()] == [b"of another"]

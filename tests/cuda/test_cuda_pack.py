"""Packs of kernels for MXNet's CUDA build: written, read, refused."""
import dataclasses
import json
import struct

import gluon_amp  # noqa: F401  (before mxnet)
import pytest
from gluon_amp.cuda import fatbin, pack

ELF = b"\x7fELF\x02\x01\x01\x33\x07" + bytes(100)
CODE = [pack.Code("src/operator/tensor/dot.cu", 3, fatbin.fat_binary([fatbin.entry(ELF, 90)]),
                  ["_Z3dotf", "_Z3dotd"]),
        pack.Code("src/operator/nn/softmax.cu", 0,
                  fatbin.fat_binary([fatbin.entry(ELF + b"more", 90)]), ["_Z7softmaxf"])]
FACTS = {"libmxnet": "ab" * 32, "compiler": "nvcc 13.0.88", "licences": ["Apache-2.0"]}


@pytest.fixture()
def written(tmp_path):
    path = tmp_path / "90.pack"
    pack.write(path, 90, CODE, **FACTS)
    return path


def changed(path, change):
    """Rewrites the manifest; offsets stay relative to its end."""
    data = path.read_bytes()
    magic, version, length = struct.unpack_from("<8sII", data)
    manifest = json.loads(data[16:16 + length])
    change(manifest)
    text = json.dumps(manifest).encode()
    body = data[16 + length + -(16 + length) % 16:]
    path.write_bytes(struct.pack("<8sII", magic, version, len(text)) + text
                     + bytes(-len(text) % 16) + body)


def test_pack_returns_what_was_written(written):
    read = pack.read(written)
    read.verify()
    assert (read.arch, read.kind) == (90, "cubin")
    assert read.manifest["libmxnet"] == FACTS["libmxnet"]
    assert read.manifest["versions"]["compiler"] == FACTS["compiler"]
    for part, code in zip(read.parts, CODE):
        assert (part.source, part.index) == (code.source, code.index)
        assert part.kernels() == sorted(code.kernels)
        assert bytes(part.fat_binary) == code.fat_binary
    offsets = [part["offset"] for part in read.manifest["parts"]]
    assert [offset % 16 for offset in offsets] == [0, 0]


def test_code_may_be_a_file(tmp_path, written):
    (tmp_path / "code").write_bytes(CODE[0].fat_binary)
    moved = dataclasses.replace(CODE[0], fat_binary=tmp_path / "code")
    pack.write(tmp_path / "other", 90, [moved, CODE[1]], **FACTS)
    assert (tmp_path / "other").read_bytes() == written.read_bytes()


def test_compressed_code_and_ptx_keep_their_sizes():
    cubin, = fatbin.entries(fatbin.fat_binary([fatbin.entry(ELF, 90, packed=b"short")]))
    assert (cubin.kind, cubin.arch, cubin.is_compressed, bytes(cubin.code)) \
        == ("cubin", 90, True, b"short")
    text = b".version 7.8\n.target sm_90\0"
    ptx, = fatbin.entries(fatbin.fat_binary([fatbin.entry(text, 90, "ptx")]))
    assert (ptx.kind, ptx.is_compressed, ptx.code[:len(text)]) == ("ptx", False, text)


def test_relabelled_code_is_the_same_code():
    moved = fatbin.entry(ELF, 86).relabelled(90)
    assert moved == fatbin.entry(ELF, 90)


def test_truncated_packs_are_refused(written):
    data = written.read_bytes()
    for length in range(len(data)):
        written.write_bytes(data[:length])
        with pytest.raises(pack.PackError, match=r"incomplete|not a pack"):
            pack.read(written)


def test_every_changed_byte_is_found(written):
    data = bytearray(written.read_bytes())
    length = struct.unpack_from("<8sII", data)[2]
    padding = -(16 + length) % 16
    begin = 16 + length + padding
    ends = [(each["offset"] + each["size"] + each["names"]["size"])
            for each in json.loads(data[16:16 + length])["parts"]]
    for at in range(begin, len(data)):
        if ends[0] <= at - begin < ends[0] + -ends[0] % 16:
            continue  # padding between parts
        data[at] ^= 0x11
        written.write_bytes(data)
        with pytest.raises(pack.PackError):
            pack.read(written).verify()
        data[at] ^= 0x11


@pytest.mark.parametrize(("content", "message"), [
    (b"", "not a pack"), (b"PK\x03\x04" + bytes(100), "not a pack"),
    (pack.MAGIC + struct.pack("<II", 2, 0), "format 2; this gluon_amp reads format 1"),
    (pack.MAGIC + struct.pack("<II", 1, 4) + b"[{]}", "manifest is invalid"),
    (pack.MAGIC + struct.pack("<II", 1, 2) + b"{}", "manifest is invalid")])
def test_foreign_files_are_refused(content, message, tmp_path):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(pack.PackError, match=message):
        pack.read(tmp_path / "file")


@pytest.mark.parametrize(("change", "message"), [
    (lambda m: m.update(arch="80"), "has code for"),
    (lambda m: m.update(arch=90), "arch is 90"),
    (lambda m: m.update(kind="sass"), "kind is 'sass'"),
    (lambda m: m["parts"][0].update(offset=-16), "numbers of"),
    (lambda m: m["parts"][0].update(offset=8), "dot.cu is invalid"),
    (lambda m: m["parts"][0].update(size=64), "dot.cu: "),
    (lambda m: m["parts"][0]["names"].update(count=9), "dot.cu is invalid"),
    (lambda m: m["parts"][1]["names"].update(size=1 << 40), "incomplete"),
    (lambda m: m["parts"].pop(), "damaged"),
    (lambda m: m.pop("libmxnet"), "manifest is invalid")])
def test_inconsistent_manifests_are_refused(change, message, written):
    changed(written, change)
    with pytest.raises(pack.PackError, match=message):
        pack.read(written)


def test_failed_write_leaves_old_pack(written):
    before = written.read_bytes()
    missing = dataclasses.replace(CODE[0], fat_binary=written.with_name("missing"))
    with pytest.raises(FileNotFoundError):
        pack.write(written, 90, [missing], **FACTS)
    assert written.read_bytes() == before
    assert list(written.parent.iterdir()) == [written]


@pytest.mark.parametrize(("arch", "kind", "serves"), [
    (90, "cubin", [90]), (100, "cubin", [100, 103]), (120, "cubin", [120, 121]),
    (90, "ptx", [90, 100, 103, 120, 121])])
def test_machine_code_serves_its_major_version_and_ptx_later_ones(arch, kind, serves):
    capabilities = [80, 86, 89, 90, 100, 103, 120, 121]
    assert [each for each in capabilities if pack.runs_on(arch, kind, each)] == serves


@pytest.fixture()
def place(tmp_path, monkeypatch):
    """The path of an installed pack for 9.0."""
    monkeypatch.setenv("GLUON_AMP_CACHE", str(tmp_path))
    pack.place(90).parent.mkdir()
    return pack.place(90)


def test_installed_packs_are_found_by_capability(place):
    assert pack.installed(90) is None
    assert pack.find(90) is None
    pack.write(place, 90, CODE, **FACTS)
    assert pack.installed(90).path == pack.find(90).path == place
    assert pack.find(100) is None
    place.rename(pack.place(100))
    with pytest.raises(pack.PackError, match=r"100\.pack has code for architecture 90 \(cubin\), "):
        pack.find(103)


def test_packs_of_other_gpus_are_not_read(place):
    place.write_bytes(b"damaged")
    pack.write(pack.place(100), 100, [dataclasses.replace(code, fat_binary=fatbin.fat_binary(
        [fatbin.entry(ELF, 100)])) for code in CODE], **FACTS)
    assert pack.find(120) is None
    assert pack.find(103).arch == 100
    with pytest.raises(pack.PackError, match=r"90\.pack is not a pack"):
        pack.find(90)


def test_machine_code_precedes_ptx(place):
    text = fatbin.fat_binary([fatbin.entry(b".version 7.8\n\0", 90, "ptx")])
    pack.write(pack.place(90, "ptx"), 90, [pack.Code("src/a.cu", 0, text, ["a"])], kind="ptx",
               **FACTS)
    assert pack.installed(90) is None
    assert pack.find(86) is None
    assert [pack.find(each).kind for each in (90, 120)] == ["ptx", "ptx"]
    pack.write(place, 90, CODE, **FACTS)
    assert [pack.find(each).kind for each in (90, 120)] == ["cubin", "ptx"]

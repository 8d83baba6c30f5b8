"""Every rule of ``manifest.json``, and what both dialects may leave out."""

import json

import pytest

from turbospark_mlx.errors import InstallError
from turbospark_mlx.gturbo import Install, strict_json

from . import handmade
from .handmade import ROOT


def open_changed(tmp_path, change, make=handmade.rust_dense, raw=None):
    """Open a hand-packed install after ``change(manifest)``; ``raw`` replaces the manifest's bytes."""
    made = make()
    change(made.manifest)
    directory = made.write(tmp_path / "i.gturbo")
    if raw is not None:
        (directory / "manifest.json").write_bytes(raw)
    return Install.open(directory, verify="off")


def put(path, value):
    """A change that sets the field at a dotted path."""

    def change(document):
        *parents, last = path.split("/")
        for key in parents:
            document = document[key]
        document[last] = value

    return change


def drop(path):
    def change(document):
        *parents, last = path.split("/")
        for key in parents:
            document = document[key]
        del document[last]

    return change


DIGEST = "0" * 64
MISSING = [
    *("magic", "versionMajor", "versionMinor", "flags", "modelID", "arch", "files", "numLayers", "expertsPerLayer"),
    *("expertStride", *(f"arch/{key}" for key in handmade.arch())),
    "files/model_weights.bin",
]
WRONG = {
    "magic": ("magic", "GTURBO2"),
    "major version": ("versionMajor", 2),
    "major version as a fraction": ("versionMajor", 1.0),
    "minor version": ("versionMinor", -1),
    "unknown flag": ("flags/mxfp8", False),
    "flag that is no boolean": ("flags/streamingPresent", 1),
    "quantized KV": ("flags/turboQuantKV", True),
    "extension flag alone": ("flags/turbosparkMlxExtension", True),
    "model id": ("modelID", ""),
    "arch": ("arch", []),
    "no layers": ("arch/numLayers", 0),
    "mask length": ("arch/fullAttentionLayerMask", [1]),
    "mask value": ("arch/fullAttentionLayerMask", [1, 6]),
    "mask of booleans": ("arch/fullAttentionLayerMask", [True, True]),
    "hidden size 0": ("arch/hiddenSize", 0),
    "hidden size negative": ("arch/hiddenSize", -64),
    "hidden size huge": ("arch/hiddenSize", 1 << 31),
    "hidden size as text": ("arch/hiddenSize", "64"),
    "hidden size true": ("arch/hiddenSize", True),
    "theta as text": ("arch/ropeTheta", "1e4"),
    "theta negative": ("arch/ropeTheta", -1.0),
    "theta huge": ("arch/ropeTheta", 10**400),
    "rotary part": ("arch/partialRotaryFactor", 1.5),
    "boolean as a number": ("arch/tieWordEmbeddings", 1),
    "activation": ("arch/hiddenActivation", ""),
    "top k without experts": ("arch/topKExperts", 1),
    "family": ("arch/family", 3),
    "optional integer": ("arch/linearNumKHeads", 2.5),
    "optional number": ("arch/attentionScale", "1"),
    "optional boolean": ("arch/ropeNeoxSubdim", 0),
    "optional array": ("arch/pleLayerIds", 2),
    "quant": ("quant", 4),
    "quant slot": ("quant/router", None),
    "quant bits": ("quant/router/weightBits", 33),
    "quant scheme": ("quant/router/scheme", ""),
    "expert layers of a dense model": ("numLayers", 2),
    "experts of a dense model": ("expertsPerLayer", 1),
    "stride of a dense model": ("expertStride", 16384),
    "capability": ("capability", 1),
    "file entry": ("files/model_weights.bin", 3),
    "file size": ("files/model_weights.bin/size", -1),
    "file size as a fraction": ("files/model_weights.bin/size", 1e3),
    "digest too short": ("files/model_weights.bin/sha256", "0" * 63),
    "digest not hexadecimal": ("files/model_weights.bin/sha256", "g" * 64),
}


@pytest.mark.parametrize("field", MISSING)
def test_a_missing_field_is_named(field, tmp_path):
    name = field.rpartition("/")[2]
    with pytest.raises(InstallError, match=rf"manifest\.json: .*{name} is (missing|not 'GTURBO')"):
        open_changed(tmp_path, drop(field))


def test_a_manifest_without_the_experts_layout_is_refused(tmp_path):
    with pytest.raises(InstallError, match=r"files.packed_experts/layout\.json is missing"):
        open_changed(tmp_path, lambda document: document["files"].pop("packed_experts/layout.json"))


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_value_is_refused_by_name(fault, tmp_path):
    path, value = WRONG[fault]
    named = "turbosparkMlx is missing" if "turbosparkMlx" in path else path.rpartition("/")[2]
    with pytest.raises(InstallError, match=rf"manifest\.json: .*{named}"):
        open_changed(tmp_path, put(path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("numLayers", 1),
        ("numLayers", 3),
        ("expertsPerLayer", 2),
        ("expertStride", 0),
        ("expertStride", 16385),
        ("arch/topKExperts", 0),
        ("arch/topKExperts", 4),
    ],
)
def test_expert_counts_agree_with_the_architecture(path, value, tmp_path):
    with pytest.raises(InstallError, match=rf"manifest\.json: .*{path.split('/')[-1]}"):
        open_changed(tmp_path, put(path, value), handmade.swift_moe)


def test_leading_dense_layers_have_no_expert_file(tmp_path):
    with pytest.raises(InstallError, match="numDenseLeadingLayers"):
        open_changed(tmp_path, put("arch/numDenseLeadingLayers", 4), handmade.rust_moe)
    with pytest.raises(InstallError, match="numLayers is 2; arch gives 3"):
        open_changed(tmp_path, put("arch/numDenseLeadingLayers", 0), handmade.rust_moe)


@pytest.mark.parametrize(
    "change",
    [
        put("arch/somethingNew", {"a": [1]}),
        put("somethingNew", 1),
        put("arch/finalLogitSoftcap", 0),
        put("arch/swigluLimit", None),
        put("quant", None),
        drop("quant"),
        put("versionMinor", 3),
        drop("sourceSnapshotHash"),
    ],
)
def test_what_elder_readers_allow_is_allowed(change, tmp_path):
    open_changed(tmp_path, change).close()


def test_the_swift_writers_json_style_is_read(tmp_path):
    made = handmade.swift_moe()
    text = json.dumps(made.manifest, indent=2, sort_keys=True).replace('": ', '" : ').replace("10000.0", "10000")
    with open_changed(tmp_path, lambda _: None, handmade.swift_moe, raw=text.encode()) as install:
        assert install.arch["finalLogitSoftcap"] == 30
        assert install.manifest.family == "gemma4"


def test_a_digest_in_upper_case_is_the_same(tmp_path):
    made = handmade.rust_dense()
    record = made.manifest["files"]["model_weights.bin"]
    record["sha256"] = record["sha256"].upper()
    Install.open(made.write(tmp_path / "i.gturbo"), verify="full").close()


BAD_PATHS = {
    "parent": "../outside.bin",
    "inner parent": "packed_experts/../model_weights.bin",
    "absolute": "/etc/passwd",
    "current": "./model_weights.bin",
    "double slash": "packed_experts//layout.json",
    "trailing slash": "packed_experts/",
    "empty": "",
    "NUL": "a\0b",
    "too long": "a" * 1025,
    "the manifest": "manifest.json",
    "the manifest in capitals": "MANIFEST.JSON",
    "below the manifest": "manifest.json/x",
    "elder receipt": "verified-install.json",
    "below the elder receipt": "Verified-Install.json/x",
    "bare tokenizer": "tokenizer",
    "another case": "MODEL_WEIGHTS.BIN",
    "below a file": "model_weights.bin/x",
    "below a file in another case": "Model_Weights.bin/x/y",
}


@pytest.mark.parametrize("kind", BAD_PATHS)
def test_paths_that_lead_elsewhere_are_refused(kind, tmp_path):
    def change(document):
        document["files"][BAD_PATHS[kind]] = {"size": 1, "sha256": DIGEST}

    with pytest.raises(InstallError, match=r"manifest\.json: "):
        open_changed(tmp_path, change)


def test_two_normal_forms_of_a_path_are_one_file(tmp_path):
    def change(document):
        for name in ("caf\u00e9", "CAFE\u0301"):
            document["files"][name] = {"size": 1, "sha256": DIGEST}

    with pytest.raises(InstallError, match="same file"):
        open_changed(tmp_path, change)


TEXTS = {
    "empty": (b"", "not valid JSON"),
    "cut": (b'{"magic": "GTURBO"', "not valid JSON"),
    "trailing text": (b'{"magic": "GTURBO"} {}', "not valid JSON"),
    "byte order mark": (b"\xef\xbb\xbf{}", "not valid JSON"),
    "UTF-16": ('{"magic": "GTURBO"}'.encode("utf-16"), "not UTF-8"),
    "not UTF-8": (b'{"magic": "\xff"}', r"not UTF-8 text \(byte 11\)"),
    "an array": (b"[]", "the document is an array"),
    "a null": (b"null", "the document is null"),
    "a key twice": (b'{"magic": "GTURBO", "a": {"b": 1, "b": 1}}', "the key 'b' twice"),
    "NaN": (b'{"magic": NaN}', "NaN"),
    "infinity": (b'{"magic": -Infinity}', "-Infinity"),
    "a float beyond range": (b'{"magic": 1e999}', "1e999"),
    "a huge integer": (b'{"versionMajor": ' + b"9" * 5000 + b"}", "not valid JSON"),
    "deep nesting": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "deeper than 32"),
    "deep arrays after a bracket in a string": (b'["]]]]]", ' + b"[" * 40 + b"]" * 41, "deeper than 32"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "not valid JSON"),
    "too large": (b" " * ((4 << 20) + 1), "at most 4194304"),
    "a lone surrogate in a path": (b'{"files": {"\\ud800": 1}}', "magic"),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_texts_that_are_no_manifest(kind, tmp_path):
    raw, message = TEXTS[kind]
    with pytest.raises(InstallError, match=r"manifest\.json: .*" + message):
        open_changed(tmp_path, lambda _: None, raw=raw)


def test_a_lone_surrogate_in_a_path_is_refused(tmp_path):
    made = handmade.rust_dense()
    made.manifest["files"]["\udc80"] = {"size": 1, "sha256": DIGEST}
    with pytest.raises(InstallError, match="not valid Unicode") as refused:
        Install.open(made.write(tmp_path / "i.gturbo"), verify="off")
    str(refused.value).encode()


def test_control_characters_do_not_reach_the_terminal(tmp_path):
    with pytest.raises(InstallError) as refused:
        open_changed(tmp_path, put("flags/\x1b[31m\r\n", True))
    assert str(refused.value).isprintable()


def extension(**changes):
    return {"version": 1, "arch": {"rms_norm_eps": 1e-4}, "tensors": {}, **changes}


def with_extension(block, flag=True):
    def change(document):
        document["turbosparkMlx"] = block
        document["flags"] = {"turbosparkMlxExtension": True} if flag else {}

    return change


FORMAT = {"bits": 3, "groupSize": 32, "companionDtype": "float16"}


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (extension(version=2), "turbosparkMlx.version is 2; this version reads 1"),
        (extension(experts={}), "turbosparkMlx.experts is not known"),
        (extension(arch=[]), "turbosparkMlx.arch is an array"),
        ({"arch": {}}, "turbosparkMlx.version is missing"),
        (extension(tensors={"w": {**FORMAT, "mode": "mxfp4"}}), "turbosparkMlx.tensors.w.mode is not known"),
        (extension(tensors={"w": {**FORMAT, "bits": 7}}), "turbosparkMlx.tensors.w declares 7 bits"),
        (extension(tensors={"w": {**FORMAT, "groupSize": 16}}), "turbosparkMlx.tensors.w declares group size 16"),
        (extension(tensors={"w": {**FORMAT, "companionDtype": "fp16"}}), "turbosparkMlx.tensors.w declares companions"),
        (extension(tensors={"w": {"bits": 4, "groupSize": 64}}), "turbosparkMlx.tensors.w.companionDtype is missing"),
        (extension(tensors={"w": FORMAT}), "has no tensor 'w'"),
        (extension(tensors={ROOT + "embed_tokens.weight": FORMAT}), "needs dtype tag 0"),
    ],
)
def test_the_extension_block_is_read_strictly(block, message, tmp_path):
    with pytest.raises(InstallError, match=message):
        open_changed(tmp_path, with_extension(block))


def test_formats_without_the_flag_are_refused(tmp_path):
    with pytest.raises(InstallError, match=r"turbosparkMlx\.tensors declares .*flags.turbosparkMlxExtension"):
        open_changed(tmp_path, with_extension(extension(tensors={"w": FORMAT}), flag=False))


def test_the_extension_reaches_the_family(tmp_path):
    with open_changed(tmp_path, with_extension(extension(), flag=False)) as install:
        assert install.extension == {"rms_norm_eps": 1e-4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("capability", "image-generation"), "image-generation"),
        (put("quant/hadamard", {"block": 64}), "rotated"),
    ],
)
def test_what_no_engine_of_ours_runs_is_refused_unless_asked(change, message, tmp_path):
    with pytest.raises(InstallError, match=message):
        open_changed(tmp_path, change)
    with Install.open(tmp_path / "i.gturbo", verify="off", allow_unrunnable=True) as install:
        assert message in install.obstacles[0]


def test_a_text_of_very_many_values_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    monkeypatch.setattr(strict_json, "MAX_VALUES", 1000)
    with pytest.raises(InstallError, match="more than 1000 JSON values"):
        open_changed(tmp_path, put("quant", [[]] * 400))
    open_changed(tmp_path / "b", put("note", "[]," * 400 + '\\"[[[' * 400)).close()

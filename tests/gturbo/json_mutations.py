"""Changes of ``manifest.json`` and ``layout.json``, as documents and as texts."""

from __future__ import annotations

import copy
import json
import re

import pytest

from turbospark_mlx.errors import InstallError
from turbospark_mlx.gturbo import Install

from . import handmade
from .mutation import LAYOUT, MANIFEST, WEIGHTS, Mutation, overwrite, refused, rust_dense, rust_moe, swift_moe
from .test_manifest import BAD_PATHS, TEXTS

# Values of every JSON kind; each place in a document understands at most a few of them.
STRANGE = (None, True, -1, 1.5, 2**70, "x", [], {}, [[]], {"a": 1})


def leaves(document, path=()):
    """The path of every value inside a JSON document."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield (*path, key)
        yield from leaves(value, (*path, key))


def with_value(document, path, value):
    changed = copy.deepcopy(document)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


ARCH_NUMBERS = ("finalLogitSoftcap", "ropeTheta", "fullRopeTheta", "partialRotaryFactor")


def manifest_understands(path: tuple, value: object) -> bool:
    """Whether a manifest may hold ``value`` (one of STRANGE) at ``path``: stated for each place by its kind."""
    where = ".".join(map(str, path))
    if value is None:
        return where in (
            "quant",
            "sourceSnapshotHash",
            "arch.family",
            "arch.trainedContext",
            "arch.routerScoringFunc",
        ) or (where == "bitWidthOverridesHonored")
    if value == {} and path == ("quant",):
        return True
    if where in ("modelID", "sourceSnapshotHash", "arch.family", "arch.hiddenActivation", "arch.routerScoringFunc"):
        return value == "x"
    if path[-1] in ("scheme", "scaleType", "biasType"):
        return value == "x"
    if path[0] == "flags" and len(path) == 2:
        return value is True and path[-1] != "turboQuantKV"
    if path[-1] in ("tieWordEmbeddings", "attentionKEqV"):
        return value is True
    if where == "arch.finalLogitSoftcap":
        return value == -1 or value == 1.5
    if where in ("arch.ropeTheta", "arch.fullRopeTheta"):
        return value == 1.5
    return path == ("flags",) and value == {}


def strange_manifest_values(random) -> list[Mutation]:
    found = []
    for make in (rust_dense, swift_moe):
        good = make().manifest
        for path in leaves(good):
            for value in STRANGE:
                if value == {} and path == ("flags",):
                    continue
                found.append(_manifest_mutation(make, path, value, manifest_understands(path, value)))
    return [found[i] for i in sorted(random.choice(len(found), 500, replace=False))]


def _manifest_mutation(make, path, value, understood) -> Mutation:
    def changed():
        made = make()
        made.manifest = with_value(made.manifest, path, value)
        return made

    def opens(result):
        assert isinstance(result, Install), f"refused, but a manifest may say this: {result}"
        assert result.manifest.document == changed().manifest

    # A path of several components is named by its last that is a key, or by a parent that fell with it.
    keys = [re.escape(key) for key in path if isinstance(key, str)]
    judge = opens if understood else refused(MANIFEST, "|".join(keys))
    return Mutation(f"{make.__name__}: manifest {path} is {value!r}", changed, judge)


def layout_understands(good: dict, path: tuple, value: object) -> bool:
    """Whether a layout may hold ``value`` at ``path``: a layer without a stride has the model's, and the tables of
    experts after the first are compared as numbers with the first one's, which is the one that is read."""
    if path[-1] == "expertStride" and len(path) > 1:
        return value is None
    return "tensors" in path and path[3] > 0 and value == _get(good, path)


def strange_layout_values(random) -> list[Mutation]:
    found = []
    for make in (swift_moe, rust_moe):
        good = json.loads(make().files[LAYOUT])
        for path in leaves(good):
            for value in STRANGE:
                found.append(_layout_mutation(make, path, value, layout_understands(good, path, value)))
    return [found[i] for i in sorted(random.choice(len(found), 300, replace=False))]


def _layout_mutation(make, path, value, understood) -> Mutation:
    def changed():
        made = make()
        made.files[LAYOUT] = handmade.dump(with_value(json.loads(made.files[LAYOUT]), path, value))
        return made.seal()

    def opens(result):
        assert isinstance(result, Install), f"refused, but a layout may say this: {result}"
        if path[-1] == "expertStride":
            assert result.experts.layers[path[1]].stride == result.experts.stride

    judge = opens if understood else refused(r"layout\.json: |layer_0\d\.bin", "layers|expert|numLayers")
    return Mutation(f"{make.__name__}: layout {path} is {value!r}", changed, judge)


# What only the manifest says, and nothing else in the install can contradict.
STATEMENTS = re.compile(
    r"arch\.(?!numLayers|numExperts|numDense)|modelID|quant\.|sourceSnapshotHash|versionMinor|bitWidth|flags\.(stream|ane)"
)


def damaged_manifest_text(random) -> list[Mutation]:
    """Cut texts and changed characters. A changed text that still opens differs only in statements, in the names of
    keys that readers do not know, or in digits of hashes, which hashing finds."""
    found = []
    for make in (rust_dense, swift_moe):
        text = handmade.dump(make().manifest)
        for end in random.choice(len(text), 30, replace=False):
            found.append(_text_mutation(make, f"manifest cut at {end}", text[:end], refused(MANIFEST, "JSON|magic")))
        for position in random.choice(len(text), 120, replace=False):
            new = bytes([text[position] ^ (1 << int(random.integers(8)))])
            bad = text[:position] + new + text[position + 1 :]
            found.append(_text_mutation(make, f"manifest byte {position} is {new!r}", bad, judge_text(make, bad)))
    return found


def _text_mutation(make, what, data, judge) -> Mutation:
    def place(directory):
        overwrite(directory / MANIFEST, data)

    return Mutation(f"{make.__name__}: {what}", make, judge, place)


def judge_text(make, bad: bytes):
    def judge(result):
        if isinstance(result, InstallError):
            assert re.search(rf"{MANIFEST}|is missing|bytes; manifest", str(result)), str(result)
            return
        good, now = make().manifest, json.loads(bad)
        known = {key for path in leaves(good) for key in path}
        differing = {path for path in {*leaves(good), *leaves(now)} if _get(good, path) != _get(now, path)}
        for path in differing:
            where = ".".join(map(str, path))
            parent = any(other[: len(path)] == path and other != path for other in differing)
            unknown = any(key not in known for key in path)
            assert (
                parent
                or unknown
                or STATEMENTS.match(where)
                or where.endswith(".sha256")
                or path[0] == "sourceSnapshotHash"
            ), where
        hashes = [path for path in differing if path[-1] == "sha256"]
        if any(_get(good, path).lower() != _get(now, path).lower() for path in hashes):
            with pytest.raises(InstallError, match="SHA-256"):
                Install.open(result.path, verify="full")

    return judge


def _get(document, path):
    for key in path:
        try:
            document = document[key]
        except (KeyError, IndexError, TypeError):
            return "absent"
    return document


def hostile_texts(random) -> list[Mutation]:
    found = []
    for kind, (raw, _) in TEXTS.items():
        found.append(_text_mutation(rust_dense, f"manifest: {kind}", raw, refused(MANIFEST)))

        def changed(raw=raw):
            made = rust_moe()
            made.files[LAYOUT] = raw
            return made.seal()

        found.append(Mutation(f"layout: {kind}", changed, refused(r"layout\.json")))
    return found


def hostile_paths(random) -> list[Mutation]:
    found = []
    for kind, name in BAD_PATHS.items():
        for original in (WEIGHTS, "tokenizer/tokenizer.json", "packed_experts/layer_00.bin"):

            def changed(original=original, name=name):
                made = swift_moe()
                made.manifest["files"][name] = made.manifest["files"].pop(original)
                return made

            found.append(Mutation(f"{original} is listed as {kind}", changed, refused(MANIFEST + "|is missing")))
        found.append(_layout_mutation(swift_moe, ("layers", 0, "file"), name, understood=False))
    return found

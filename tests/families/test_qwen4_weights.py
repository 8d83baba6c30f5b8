"""Qwen4-Exp's tensors: every layout that checkpoints have makes the same model; its table is read by the row."""

import json
import os
import shutil

import numpy as np
import pytest

from tests.convert.checkpoints import mlx_quantized, plain, read_install, refused, run, write_checkpoint
from tests.families.oracles import FAMILIES, PROMPT, assert_close
from tests.families.test_qwen_weights import rounded
from tests.families.test_routed_installs import dequantized
from turbospark_mlx.errors import ConvertError, InstallError
from turbospark_mlx.families import family_for_model_type
from turbospark_mlx.families.qwen4.weights import expected, place, settle
from turbospark_mlx.gturbo import Install
from turbospark_mlx.protocols import Dropped
from turbospark_mlx.runner import Runner
from turbospark_mlx.table import DiskTable
from turbospark_mlx.testing import make_tiny_install, tiny_config, tiny_weights

CENTERED = ("hc_norm.weight", "q_norm.weight", "k_norm.weight", "q_layernorm.weight", "k_layernorm.weight")
CENTERED += ("norm_key.weight", "norm_query.weight", "norm_conv.weight")
TABLE = "ngram_embedding.weight"
SHARDS = 4


def config_of(variant="qwen4"):
    return family_for_model_type("qwen4_exp").config_from_hf(tiny_config("qwen4", variant))


def shards(name, table):
    return {name.replace(".weight", f".shard_{n}.weight"): part for n, part in enumerate(np.split(table, SHARDS))}


def published(config, *, experts="joined", extra=False, shard=True):
    """A checkpoint's tensors under published names, in float32."""
    found = {}
    for name, array in rounded(tiny_weights(config)).items():
        name = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
        base, _, matrix = name.partition(".mlp.switch_mlp.")
        if name.endswith(TABLE) and shard:
            found |= shards(name, array)
        elif name.endswith("conv1d.weight"):
            found[name] = array[:, None]
        elif not matrix:
            found[name] = array
        elif experts == "single":
            found |= {f"{base}.mlp.experts.{e}.{matrix}": array[e] for e in range(len(array))}
        elif matrix.startswith("down"):
            found[f"{base}.mlp.experts.down_proj"] = array
        else:
            found.setdefault(f"{base}.mlp.experts.gate_up_proj", {})[matrix] = array
    for name, halves in found.items():
        if isinstance(halves, dict):
            found[name] = np.concatenate([halves["gate_proj.weight"], halves["up_proj.weight"]], axis=1)
    if extra:
        found["model.visual.patch_embed.proj.weight"] = np.zeros((4, 3), np.float32)
        found["mtp.fc.weight"] = np.zeros((64, 128), np.float32)
    return found


def constants(**changed):
    """The hash's constants, as a checkpoint of the default variant has them."""
    hashed, path = config_of().ngram_hash, "model.language_model.layers.1.ple.ple_embedding"
    values = {
        "layer_multipliers": hashed.multipliers,
        "ngram_heads_vocab_sizes": hashed.sizes,
        "ngram_heads_offsets": hashed.offsets,
        **changed,
    }
    return {f"{path}.{name}": ("I64", np.array(value, "<i8")) for name, value in values.items()}


def as_mlx(config, *, folded=True):
    """What programs for MLX make of the same checkpoint: other names, turned convolutions, norms with 1 added."""
    found = {}
    for name, array in rounded(tiny_weights(config)).items():
        if name.endswith(TABLE):
            found |= shards(f"language_model.{name}", array)
            continue
        if name.endswith("conv1d.weight"):
            array = array[:, :, None]
        elif name.endswith(CENTERED) and folded:
            array = array + 1
        found[f"language_model.{name}"] = array
    return found


def convert_and_run(tmp_path, name, config, tensors, **options):
    source = write_checkpoint(tmp_path / name, config, tensors)
    report = run(source, tmp_path / f"{name}.gturbo", **options)
    with Runner.open(tmp_path / f"{name}.gturbo", kernels="reference") as runner:
        return report, np.array(runner.prefill(PROMPT[:30]))


def centered(path):
    return json.loads((path / "manifest.json").read_text())["turbosparkMlx"]["arch"]["centered_norms"]


@pytest.mark.parametrize(("experts", "extra", "shard"), [("joined", True, True), ("single", False, False)])
def test_a_published_checkpoint(experts, extra, shard, tmp_path):
    """Close to the oracle on its own weights; its bytes are kept; towers and other heads are left out by name."""
    config = tiny_config("qwen4")
    tensors = plain(published(config, experts=experts, extra=extra, shard=shard)) | (constants() if extra else {})
    report, logits = convert_and_run(tmp_path, "raw", config, tensors, bits=16)
    weights = rounded(tiny_weights(config))
    assert_close(logits, FAMILIES["qwen4"].reference(config, weights, PROMPT[:30])[-1])
    stored = read_install(tmp_path / "raw.gturbo")
    for name in (
        "layers.0.linear_attn.conv1d.weight",
        "layers.1.ple.conv1d.weight",
        "layers.2.self_attn.q_proj.weight",
    ):
        array, entry = tensors[f"model.language_model.{name}"][1], stored[f"language_model.model.{name}"]
        assert entry["data"] == array.tobytes()
    whole = plain({"t": weights[f"model.layers.1.ple.ple_embedding.{TABLE}"]})["t"][1]
    assert (tmp_path / "raw.gturbo" / "ngram_table" / "rows.bin").read_bytes() == whole.tobytes()
    left_out = {"model.visual.patch_embed.proj.weight", "mtp.fc.weight", *constants()}
    assert set(report.dropped) == (left_out if extra else set())
    assert centered(tmp_path / "raw.gturbo") is True


def test_norms_that_were_added_to_are_the_same_model(tmp_path):
    """Close, in float32, where adding 1 loses little; then converted again, exact."""
    config = tiny_config("qwen4")
    _, ours = convert_and_run(tmp_path, "raw", config, plain(published(config), "float32"), bits=16)
    _, theirs = convert_and_run(tmp_path, "mlx", config, plain(as_mlx(config), "float32"), bits=16)
    _, others = convert_and_run(tmp_path, "still", config, plain(as_mlx(config, folded=False), "float32"), bits=16)
    assert_close(theirs, ours)
    np.testing.assert_array_equal(others, ours)
    assert [centered(tmp_path / f"{name}.gturbo") for name in ("raw", "mlx", "still")] == [True, False, True]
    for name in ("raw", "mlx"):
        run(tmp_path / f"{name}.gturbo", tmp_path / "again.gturbo", overwrite=True, bits=16)
        assert read_install(tmp_path / "again.gturbo") == read_install(tmp_path / f"{name}.gturbo")
        for file in ("header.json", "rows.bin"):
            again, before = (tmp_path / f"{n}.gturbo" / "ngram_table" / file for n in ("again", name))
            assert again.read_bytes() == before.read_bytes()


@pytest.mark.parametrize(
    "raw", [(), (".in_proj_a.weight", ".in_proj_b.weight", "inject_weight.weight", "qk_proj.weight")]
)
def test_an_mlx_quantized_copy(raw, tmp_path):
    """Packed matrices, and rows of the table, are kept bit for bit; close to the oracle on what they stand for. Some
    copies keep small matrices as they are."""
    config, tensors = tiny_config("qwen4"), as_mlx(tiny_config("qwen4"))
    routers = (".mlp.gate.weight", "shared_expert_gate.weight")
    formats = {
        name: (8 if name.endswith(routers) else 4, 32 if ".shard_" in name else 64)
        for name, array in tensors.items()
        if array.ndim > 1 and "conv1d" not in name and not (raw and name.endswith(raw))
    }
    settings = {"group_size": 64, "bits": 4, "mode": "affine"}
    special = {
        name.removesuffix(".weight"): settings | {"bits": form[0], "group_size": form[1]}
        for name, form in formats.items()
        if form != (4, 64)
    }
    stored = mlx_quantized(tensors, formats)
    quantized = config | {"quantization": settings | special}
    _, logits = convert_and_run(tmp_path, "mlx", quantized, stored)
    for name, entry in read_install(tmp_path / "mlx.gturbo").items():
        assert entry["data"] == stored[name][1].tobytes(), name
        if name in formats:
            assert entry["scales"] == stored[name.replace(".weight", ".scales")][1].tobytes(), name
    rows = np.fromfile(tmp_path / "mlx.gturbo" / "ngram_table" / "rows.bin", np.uint8).reshape(SHARDS, -1, 16 + 2 + 2)
    for number in range(SHARDS):
        stem = f"language_model.model.layers.1.ple.ple_embedding.ngram_embedding.shard_{number}"
        parts = [stored[f"{stem}.{part}"][1] for part in ("weight", "scales", "biases")]
        together = np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=1)
        np.testing.assert_array_equal(rows[number], together)
    weights = dequantized(tmp_path / "mlx.gturbo")
    for name in weights:
        weights[name] = weights[name] - 1 if name.endswith(CENTERED) else weights[name]
    assert_close(logits, FAMILIES["qwen4"].reference(config, weights, PROMPT[:30])[-1])


@pytest.mark.parametrize("by", [0.65, -0.8, 2.0])
def test_norms_of_neither_kind_are_refused(by, tmp_path):
    config = tiny_config("qwen4")
    tensors = published(config)
    for name in tensors:
        if name.endswith("attn_hyper_connection.hc_norm.weight"):
            tensors[name] = tensors[name] + by
    source = write_checkpoint(tmp_path / "odd", config, plain(tensors))
    refused(source, tmp_path, "nobody knows whether norms are stored less 1")


def test_half_of_the_norms_added_to_are_refused(tmp_path):
    config = tiny_config("qwen4")
    tensors = published(config)
    tensors["model.language_model.layers.1.attn_hyper_connection.hc_norm.weight"] += 1
    source = write_checkpoint(tmp_path / "half", config, plain(tensors))
    refused(source, tmp_path, "33% exceed 0.5")


@pytest.mark.filterwarnings("error")
def test_a_norm_without_values_is_refused_by_its_shape(tmp_path):
    config = tiny_config("qwen4")
    tensors = published(config)
    name = "model.language_model.layers.0.attn_hyper_connection.hc_norm.weight"
    tensors[name] = tensors[name][:0]
    refused(write_checkpoint(tmp_path / "empty", config, plain(tensors)), tmp_path, name, "[0]", "[256]")


def test_constants_of_another_hash_are_refused(tmp_path):
    config = tiny_config("qwen4")
    for name, value in (("layer_multipliers", [1, 3, 5]), ("ngram_heads_vocab_sizes", [199, 211])):
        source = write_checkpoint(tmp_path / name, config, plain(published(config)) | constants(**{name: value}))
        refused(source, tmp_path, name, "config.json's n-gram fields give")


def test_a_table_that_is_not_all_there_is_refused(tmp_path):
    config, stem = tiny_config("qwen4"), "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"
    tensors = published(config)
    lost = {name: array for name, array in tensors.items() if name != f"{stem}.shard_2.weight"}
    refused(write_checkpoint(tmp_path / "lost", config, plain(lost)), tmp_path, "lacks part 2 of", "0 more of 4")
    cut = tensors | {f"{stem}.shard_1.weight": tensors[f"{stem}.shard_1.weight"][:-1]}
    refused(write_checkpoint(tmp_path / "cut", config, plain(cut)), tmp_path, "shard_1", "has shape")
    mixed = plain(tensors) | plain({f"{stem}.shard_3.weight": tensors[f"{stem}.shard_3.weight"]}, "float32")
    refused(write_checkpoint(tmp_path / "mixed", config, mixed), tmp_path, "shard_3", "have to be stored alike")
    both = tensors | {f"{stem}.weight": np.concatenate([tensors[f"{stem}.shard_{n}.weight"] for n in range(SHARDS)])}
    refused(write_checkpoint(tmp_path / "both", config, plain(both)), tmp_path, "has the same place as")
    with pytest.raises(ConvertError, match="has no place in layer 1"):
        place(f"{stem}.shard_4.weight", config_of())


def test_settling_twice_changes_nothing():
    for change in (0, 1):
        weights = {
            name: tiny_weights(tiny_config("qwen4"))[name] + change
            for name in tiny_weights(tiny_config("qwen4"))
            if name.endswith("hc_norm.weight")
        }
        shapes = {name: array.shape for name, array in weights.items()}
        once = settle(config_of(), shapes, weights.__getitem__)
        assert once.centered_norms == (change == 0)
        assert settle(once, shapes, weights.__getitem__) == once


def test_every_spelling_has_one_place():
    config = config_of()
    for name in expected(config):
        plain_name = name.removeprefix("language_model.")
        for spelling in (name, plain_name, plain_name.replace("model.", "model.language_model.", 1)):
            assert place(spelling, config).name == name
    assert isinstance(place("model.layers.2.self_attn.rotary_emb.inv_freq", config), Dropped)
    for wrong in ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "model.layers.03.mlp.gate.weight"):
        with pytest.raises(ConvertError):
            place(wrong, config)


class TestTable:
    @pytest.fixture(scope="class")
    def path(self, tmp_path_factory):
        return make_tiny_install("qwen4", tmp_path_factory.mktemp("table") / "x.gturbo")

    def test_rows_are_read_and_nothing_else(self, path, monkeypatch):
        """A run of tokens reads each of their rows once, and opening reads none."""
        from turbospark_mlx.gturbo import files

        read, original = [], files.OpenFile.read_into

        def counting(self, offset, buffer):
            if self.label.endswith("rows.bin"):
                read.append((offset, len(buffer)))
            return original(self, offset, buffer)

        monkeypatch.setattr(files.OpenFile, "read_into", counting)
        with Runner.open(path, kernels="reference", verify="off") as runner:
            assert read == []
            runner.prefill(PROMPT[:30])
            assert len(read) <= 2 * 30
            assert {size for _, size in read} == {runner._install.table.record_bytes}
            assert len(set(read)) == len(read)
            del read[:]
            runner.decode(PROMPT[30])
            assert len(read) == 2

    def test_ids_are_checked_before_anything_is_read(self, path):
        with Install.open(path, verify="off") as install:
            table = DiskTable(install)
        rows = table.shape[0]
        for ids in ([-1, 3], [rows], [0, 2**40]):
            with pytest.raises(IndexError, match=f"the table has {rows}"):
                table.rows(np.array([ids]))
        assert table.rows_read == 0
        assert table.rows(np.array([[rows - 1, 0, 0]])).shape == (1, 3, 32)
        assert table.rows_read == 2

    def test_a_file_that_is_written_to_while_it_is_open_is_found(self, path, tmp_path):
        copy = tmp_path / "copy.gturbo"
        shutil.copytree(path, copy)
        with Install.open(copy, verify="off") as install:
            table = DiskTable(install)
        before = table.rows(np.array([[0]]))
        rows = copy / "ngram_table" / "rows.bin"
        (tmp_path / "other").write_bytes(bytes(rows.stat().st_size))
        os.rename(rows, copy / "kept")
        os.rename(tmp_path / "other", rows)
        np.testing.assert_array_equal(table.rows(np.array([[0]])), before)
        os.utime(copy / "kept", ns=(0, 0))
        with pytest.raises(InstallError, match=r"rows\.bin: was changed while it was open"):
            table.rows(np.array([[0]]))

    def test_the_rows_are_of_the_file_that_was_checked(self, path, tmp_path):
        copy = tmp_path / "copy.gturbo"
        shutil.copytree(path, copy)
        with Install.open(copy, verify="off") as install:
            rows = copy / "ngram_table" / "rows.bin"
            (tmp_path / "other").write_bytes(bytes(rows.stat().st_size))
            os.rename(tmp_path / "other", rows)
            table = DiskTable(install)
        assert table.rows(np.array([[0]])).any()

    def test_a_size_is_said_by_who_declares_it(self, path, tmp_path):
        copy = tmp_path / "copy.gturbo"
        shutil.copytree(path, copy)
        manifest = json.loads((copy / "manifest.json").read_text())
        del manifest["files"]["ngram_table/rows.bin"]
        (copy / "manifest.json").write_text(json.dumps(manifest))
        os.truncate(copy / "ngram_table" / "rows.bin", 100)
        with pytest.raises(InstallError, match=r"rows\.bin: has 100 bytes; ngram_table/header\.json declares 8800"):
            Install.open(copy, verify="off")

    def test_many_rows_at_once_are_those_one_by_one(self, path):
        with Install.open(path, verify="off") as install:
            table = DiskTable(install)
        ids = np.random.default_rng(0).integers(0, table.shape[0], (3, 100))
        one_by_one = np.array([[table.rows(np.array(i)) for i in row] for row in ids])
        np.testing.assert_array_equal(table.rows(ids), one_by_one)
        every = dequantized(path)[f"model.layers.1.ple.ple_embedding.{TABLE}"]
        np.testing.assert_allclose(table.rows(ids), every[ids], atol=1e-6)

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("rows", 10, "rowsPerShard is 110; 10 rows are in 4 shards"),
            ("version", 2, "version is 2"),
            ("recordBytes", 21, "recordBytes is 21; the parts have 20"),
            ("headDim", 64, "weightBytes is 16; the format has 32"),
            ("groupSize", 48, "group size 48"),
            ("bits", 7, "7 bits"),
            ("companionDtype", "fp64", "companionDtype is 'fp64'"),
            ("layerIndex", 0, "layerIndex is 0; manifest.json calls for 1"),
            ("multipliers", [1, 3, 5], r"multipliers is \[1, 3, 5\]; manifest.json calls for"),
            ("headOffsets", [1, 211], r"headOffsets is \[1, 211\]"),
            ("multipliers", "x", "multipliers is a string"),
            ("ggmlType", "iq4_nl", "holds iq4_nl blocks, which this package does not read"),
        ],
    )
    def test_a_header_that_does_not_fit_is_refused(self, path, tmp_path, field, value, message):
        copy = self.copied(path, tmp_path)
        header = copy / "ngram_table" / "header.json"
        header.write_text(json.dumps(json.loads(header.read_text()) | {field: value}))
        with pytest.raises(InstallError, match=message):
            Runner.open(copy, verify="off", kernels="reference")

    def copied(self, path, tmp_path):
        """Without the table in the manifest, as the Rust engine writes it."""
        copy = tmp_path / "copy.gturbo"
        shutil.copytree(path, copy)
        manifest = json.loads((copy / "manifest.json").read_text())
        manifest["files"] = {name: entry for name, entry in manifest["files"].items() if "ngram_table" not in name}
        (copy / "manifest.json").write_text(json.dumps(manifest))
        return copy

    def test_a_table_that_no_manifest_lists_is_read(self, path, tmp_path):
        with Runner.open(path, kernels="reference") as listed:
            expected_logits = np.array(listed.prefill(PROMPT[:20]))
        with Runner.open(self.copied(path, tmp_path), kernels="reference") as runner:
            np.testing.assert_array_equal(np.array(runner.prefill(PROMPT[:20])), expected_logits)

    def test_rows_that_are_missing_are_refused(self, path, tmp_path):
        copy = self.copied(path, tmp_path)
        with open(copy / "ngram_table" / "rows.bin", "r+b") as file:
            file.truncate(100)
        with pytest.raises(InstallError, match="has 100 bytes"):
            Runner.open(copy, verify="off")
        shutil.rmtree(copy / "ngram_table")
        with pytest.raises(InstallError, match=r"header.json is missing, but manifest.json calls for n-grams"):
            Runner.open(copy, verify="off")

    def test_a_damaged_row_is_found(self, path, tmp_path):
        copy = tmp_path / "copy.gturbo"
        shutil.copytree(path, copy)
        rows = copy / "ngram_table" / "rows.bin"
        data = bytearray(rows.read_bytes())
        data[77] ^= 1
        rows.write_bytes(data)
        with pytest.raises(InstallError, match=r"rows.bin has SHA-256|rows.bin: has SHA-256"):
            Runner.open(copy, verify="full")

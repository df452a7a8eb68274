"""contract/families.py and contract/hugging_face.py agree with the installed transformers on the model types."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.worlds.hugging_face_configs import small_config
from shoal_workers.contract.checks.consistency import remarks
from shoal_workers.contract.checks.spec_errors import parse_spec
from shoal_workers.contract.families import FAMILIES
from shoal_workers.contract.hugging_face import HF_TASK, OF_OTHER_HEADS, PREFIX, HuggingFaceConfig
from shoal_workers.contract.hugging_face_plan import plan_of_hugging_face
from shoal_workers.contract.model import TensorStyle
from shoal_workers.data.tokenizer import load_tokenizer
from shoal_workers.engine.parallel.names import matching
from shoal_workers.tasks.hf import CausalLM, HuggingFaceLM

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 257,
    "pad_token_id": None,
}
THEIR_STYLES = {
    "colwise": TensorStyle.COLUMN,
    "rowwise": TensorStyle.ROW,
    "replicated_with_grad_allreduce": TensorStyle.PARTIAL,
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_plan_is_the_models_own(family: str) -> None:
    """But for experts, which stay whole, and the latent attention of DeepSeek, of which one part cannot be split."""
    settings = small_config(family)
    config = transformers.AutoConfig.for_model(**settings)
    plan = plan_of_hugging_face(HuggingFaceConfig(config=settings))
    assert plan is not None
    decoder = f"{PREFIX}{FAMILIES[family].decoder}."
    theirs = {
        f"{decoder}{name}": THEIR_STYLES[style]
        for name, style in (config.base_model_tp_plan or {}).items()
        if style in THEIR_STYLES and ".experts" not in name
    }
    if FAMILIES[family].has_latent_attention:
        theirs = {name: style for name, style in theirs.items() if "self_attn" not in name}
    if family == "phi":  # its plan leaves out the norms that qk_layernorm adds
        theirs |= {f"{decoder}layers.*.self_attn.{name}_layernorm": TensorStyle.PARTIAL for name in "qk"}
    if family == "qwen2_moe":  # its plan leaves the shared expert whole
        shared = f"{decoder}layers.*.mlp.shared_expert."
        theirs |= {f"{shared}gate_proj": TensorStyle.COLUMN, f"{shared}up_proj": TensorStyle.COLUMN}
        theirs[f"{shared}down_proj"] = TensorStyle.ROW
    with torch.device("meta"):
        model = CausalLM(transformers.AutoModelForCausalLM.from_config(config))
    theirs = {name: style for name, style in theirs.items() if matching(model, name)}  # without dense blocks
    ends = {f"{decoder}{FAMILIES[family].embedding}", f"{PREFIX}lm_head"}
    if "tp" in FAMILIES[family].without:
        assert not plan.tensor
    else:
        assert {name: style for name, style in plan.tensor.items() if name not in ends} == theirs
    for name in (plan.blocks, *plan.first, *plan.last):
        model.get_submodule(name)
    if config.base_model_pp_plan:
        assert {f"{decoder}{name}" for name in config.base_model_pp_plan} == {
            *(name for name in (*plan.first, *plan.last) if name.startswith(decoder)),
            plan.blocks,
        }
    experts = [name for name, one in model.named_modules() if type(one).__name__.endswith("Experts")]
    assert [name for name, _ in matching(model, plan.experts)] == experts or not (plan.experts or experts)
    defaults = transformers.AutoConfig.for_model(family)
    assert defaults.tie_word_embeddings is FAMILIES[family].tied
    dropouts = {key: value for key, value in defaults.to_dict().items() if "drop" in key and value}
    assert {k: v for k, v in dropouts.items() if k not in OF_OTHER_HEADS} == FAMILIES[family].dropouts


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_config_json_that_transformers_writes_has_all_sizes(family: str, tmp_path: Path) -> None:
    settings = small_config(family)
    transformers.AutoConfig.for_model(**settings).save_pretrained(tmp_path)
    written = plan_of_hugging_face(HuggingFaceConfig(path=str(tmp_path)))
    assert written is not None
    assert written == plan_of_hugging_face(HuggingFaceConfig(config=settings))


def _task(**model: Any) -> HuggingFaceLM:
    return HuggingFaceLM({"seq_len": 16, **model}, {"corpus": "python-stdlib"}, 0)


def test_weights_come_from_the_seed() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(7)
        states.append(_task(config={"model_type": "llama", **SIZES}).build_model().state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_vocabulary_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size 100 is smaller than the 257 tokens"):
        _task(config={"model_type": "llama", **SIZES, "vocab_size": 100}).build_model()


def test_no_other_location_is_searched(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        _task(path=str(tmp_path / "org-name")).build_model()


def test_a_checkpoint_in_a_smaller_dtype_is_trained_in_fp32(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("llama", **SIZES)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = _task(path=str(tmp_path)).build_model()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_directorys_own_tokenizer_reads_the_text_unless_another_is_named(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    data = {"corpus": "python-stdlib"}
    assert HuggingFaceLM({"path": str(tmp_path)}, data, 0).text.tokenizer == str(tokenizer)
    assert HuggingFaceLM({"path": str(tmp_path)}, {**data, "tokenizer": "bytes"}, 0).text.tokenizer == "bytes"


def _with_tokenizer(directory: Path) -> Path:
    """A model's directory with a tokenizer of words, as `save_pretrained` writes it."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[UNK]": 0, "the": 1, "fish": 2}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=own, unk_token="[UNK]").save_pretrained(directory)
    config = transformers.AutoConfig.for_model("llama", **SIZES)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def test_the_tokenizer_of_the_directory_is_used_and_named_for_the_export(tmp_path: Path) -> None:
    task = _task(path=str(_with_tokenizer(tmp_path)))
    assert load_tokenizer(task.text.tokenizer).encode(b"the fish").tolist() == [1, 2]
    files = task.export_config(task.build_model())["files"]
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert all(Path(path) == tmp_path / name for name, path in files.items())
    assert _task(config={"model_type": "llama", **SIZES}).tokenizer_files("bytes") == {}, "bytes have no tokenizer"


def test_a_directory_without_a_tokenizer_is_remarked_at_submit(tmp_path: Path) -> None:
    directory = _with_tokenizer(tmp_path)

    def remarked(**data: Any) -> list[str]:
        model = {"path": str(directory), "seq_len": 16}
        document = {"task": HF_TASK, "model": model, "data": {"corpus": "python-stdlib", **data}, "stop": {"steps": 2}}
        return [remark for remark in remarks(parse_spec(document)) if "tokenizer" in remark]

    assert remarked() == []
    (directory / "tokenizer.json").unlink()
    [remark] = remarked()
    assert str(directory) in remark and "data.tokenizer" in remark and "cannot be read" not in remark
    assert remarked(tokenizer="bytes") == [], "on purpose"


@pytest.mark.slow
def test_a_slow_tokenizer_is_named_and_the_command_of_the_remark_makes_one_that_is_used(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    config = transformers.AutoConfig.for_model("gpt2", n_embd=16, n_layer=1, n_head=2, vocab_size=300)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    pieces = tokenizers.Tokenizer(tokenizers.models.BPE())
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    pieces.train_from_iterator(["the fish swims with the shoal of fish"], trainer)
    pieces.model.save(str(tmp_path))
    data = {"corpus": "python-stdlib"}
    document = {"task": HF_TASK, "model": {"path": str(tmp_path), "seq_len": 8}, "data": data, "stop": {"steps": 2}}
    [remark] = [remark for remark in remarks(parse_spec(document)) if "tokenizer" in remark]
    assert "vocab.json and merges.txt there cannot be read, and are not exported" in remark
    slow = HuggingFaceLM({"path": str(tmp_path)}, data, 0)
    assert slow.tokenizer_files(slow.tokenizer) == {}
    program = remark.partition('python -c "')[2].partition('"')[0]
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    task = HuggingFaceLM({"path": str(tmp_path)}, data, 0)
    assert load_tokenizer(task.text.tokenizer).encode(b"the fish").tolist() == pieces.encode("the fish").ids
    assert {"tokenizer.json", "vocab.json", "merges.txt"} <= set(task.tokenizer_files(task.text.tokenizer))


def _lora(family: str, **lora: Any) -> Any:
    return _task(config=small_config(family), lora={"r": 2, **lora}).build_model()


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("llama", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("gpt2", {"c_attn", "c_proj", "c_fc"}),
        ("mixtral", {"q_proj", "k_proj", "v_proj", "o_proj"}),
    ],
)
def test_only_adapters_require_a_gradient(family: str, layers: set[str]) -> None:
    pytest.importorskip("peft")
    trained = [name for name, one in _lora(family).named_parameters() if one.requires_grad]
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained} == layers
    assert {name.partition(".lora_")[2] for name in trained} == {"A.default.weight", "B.default.weight"}


def test_an_adapter_for_a_layer_that_there_is_not_is_refused() -> None:
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match="names 'query', and no linear layer of the model has this name: down_proj, g"):
        _lora("llama", target_modules=["q_proj", "query"])
    with pytest.raises(ValueError, match=r"names 'down_proj', which in a model with experts peft takes .* k_proj, o"):
        _lora("qwen2_moe", target_modules=["down_proj"])


def test_the_files_of_the_base_are_read_again_unless_transformers_converts_them(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    config = transformers.AutoConfig.for_model("llama", **SIZES)
    network = transformers.AutoModelForCausalLM.from_config(config)
    network.save_pretrained(tmp_path / "all")
    network.model.save_pretrained(tmp_path / "base")
    for directory, is_read_again in (("all", True), ("base", False)):
        task = _task(path=str(tmp_path / directory), lora={"r": 2})
        task.build_model()
        assert task.reloads_frozen is is_read_again


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma"])
@pytest.mark.parametrize("stores", ["two", "equal", "one"])
def test_a_trained_head_in_the_files_is_read_whatever_the_config_says_of_it(
    tmp_path: Path, family: str, stores: str
) -> None:
    """As transformers: head and embedding are tied unless the files have different values of the two."""
    config = transformers.AutoConfig.for_model(**{**small_config(family), "tie_word_embeddings": stores == "one"})
    network = transformers.AutoModelForCausalLM.from_config(config)
    head, embedding = network.get_output_embeddings().weight, network.get_input_embeddings().weight
    if stores == "equal":
        head.data = embedding.data.clone()
    network.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "tie_word_embeddings": True}))
    task = _task(path=str(tmp_path))
    model = task.build_model()
    assert task.initial_weights == str(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    is_tied = stores != "two"
    assert (theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight) is is_tied
    assert (model.network.get_output_embeddings().weight is model.network.get_input_embeddings().weight) is is_tied
    assert task.export_config(model)["config"]["tie_word_embeddings"] is is_tied
    assert [remark for remark in task.remarks if "they are trained as two" in remark] == task.remarks[: not is_tied]
    plan = plan_of_hugging_face(task.settings)
    assert plan is not None and bool(plan.tied) is is_tied

"""Preferences: what a line may contain, which loss they give, and that the reference is the model at the start."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kit.worlds.hugging_face_configs import small_config
from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.hugging_face import DPO_TASK, SFT_TASK, DpoConfig
from shoal_workers.data.errors import CorpusTooSmallError, DataError
from shoal_workers.tasks.dpo import DirectPreferenceOptimization, Side, preference_losses
from shoal_workers.tasks.sft import SupervisedFineTuning

transformers = pytest.importorskip("transformers")

PAIRS = [
    {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "five"},
    {"prompt": "a", "chosen": "bcd", "rejected": "x"},
    {"prompt": "fish: ", "chosen": "two", "rejected": "a few"},
]
LORA = {"r": 4, "alpha": 8}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a small model."""
    directory = tmp_path_factory.mktemp("base")
    torch.manual_seed(5)
    network = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**small_config("llama")))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    network.save_pretrained(directory)
    return directory


def _task(folder: Path, model: dict[str, Any], *records: Any, seq_len: int = 16, **data: Any) -> Any:
    file = folder / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, records or PAIRS)) + "\n")
    given = {"paths": [str(file)], "cache_dir": str(folder / "cache"), "validation_fraction": 0, "tokenizer": "bytes"}
    return DirectPreferenceOptimization({"seq_len": seq_len, **model}, {**given, **data}, 0)


def _batch(task: Any) -> dict[str, torch.Tensor]:
    data = task.build_dataset("train")
    batch: dict[str, torch.Tensor] = task.collate([data[number] for number in range(len(data))])
    return batch


def _with_weights(task: Any, base: Path) -> Any:
    """The task's model as the engine begins it, with something learned."""
    model = task.build_model()
    stored = transformers.AutoModelForCausalLM.from_pretrained(base).state_dict()
    for own in (model.network, model.reference):
        if own is not None:
            state = {name: stored.get(name.replace(".base_layer", ""), one) for name, one in own.state_dict().items()}
            own.load_state_dict(state)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def _log_prob(network: Any, prompt: str, answer: str, *, is_mean: bool = False) -> torch.Tensor:
    """The log probability of one answer, without padding."""
    tokens = [*prompt.encode(), *answer.encode(), 256]
    logits = network(torch.tensor([tokens])).logits[0, :-1].float()
    every = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)
    own = every[len(prompt) - 1 :]
    return own.mean() if is_mean else own.sum()


def _as_trl(trained: Any, reference: Any, dpo: dict[str, Any]) -> torch.Tensor:
    """The mean loss over PAIRS by the formulas of TRL's DPOTrainer, one sequence at a time."""
    losses = []
    kind, beta, smoothing = dpo.get("loss", "sigmoid"), dpo.get("beta", 0.1), dpo.get("label_smoothing", 0.0)
    for pair in PAIRS:
        ratios = {}
        for side in ("chosen", "rejected"):
            own = _log_prob(trained, pair["prompt"], pair[side], is_mean=kind == "ipo")
            with torch.no_grad():
                theirs = _log_prob(reference, pair["prompt"], pair[side], is_mean=kind == "ipo")
            ratios[side] = own - theirs
        delta = ratios["chosen"] - ratios["rejected"]
        losses.append(
            {
                "sigmoid": -F.logsigmoid(beta * delta) * (1 - smoothing) - F.logsigmoid(-beta * delta) * smoothing,
                "ipo": (delta - 1 / (2 * beta)) ** 2,
                "hinge": torch.relu(1 - beta * delta),
            }[kind]
        )
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    "dpo", [{}, {"beta": 0.5, "label_smoothing": 0.2}, {"loss": "ipo"}, {"loss": "hinge", "beta": 0.3}], ids=str
)
@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "adapters"])
def test_loss_and_gradients_are_those_of_trl(tmp_path: Path, base: Path, dpo: dict[str, Any], lora: Any) -> None:
    if lora is not None:
        pytest.importorskip("peft")
    task = _task(tmp_path, {"path": str(base), "dpo": dpo, "lora": lora})
    model = _with_weights(task, base)
    total, weight, metrics = task.loss(model, _batch(task))
    (total / weight).backward()
    own = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    assert set(own) == {name for name, one in model.named_parameters() if one.requires_grad}
    model.zero_grad()
    if model.adapters is not None:
        model.adapters.side = Side.TRAINED
    expected = _as_trl(model.network, transformers.AutoModelForCausalLM.from_pretrained(base), dpo)
    expected.backward()
    assert (total / weight).item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    theirs = {name: one.grad for name, one in model.named_parameters() if name in own}
    largest = max(float(one.abs().max()) for one in theirs.values())
    assert max(float((own[name] - one).abs().max()) for name, one in theirs.items()) < 1e-6 * max(1.0, largest)
    assert weight == 3
    assert float(metrics["rewards/margins"]) == pytest.approx(
        float(metrics["rewards/chosen"] - metrics["rewards/rejected"]), rel=1e-5
    )


def test_a_pass_of_both_halves_is_two_passes(tmp_path: Path, base: Path) -> None:
    pytest.importorskip("peft")
    task = _task(tmp_path, {"path": str(base), "lora": LORA})
    model = _with_weights(task, base).eval()
    tokens = _batch(task)["tokens"].flatten(0, 1)
    with torch.no_grad():
        both = model(tokens.repeat(2, 1), Side.BOTH)
        torch.testing.assert_close(both, torch.cat([model(tokens, Side.TRAINED), model(tokens, Side.REFERENCE)]))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(base)(tokens).logits
        torch.testing.assert_close(both[len(tokens) :], theirs)
        assert (both[: len(tokens)] - theirs).abs().max() > 1e-2


def test_before_the_first_step_nothing_is_preferred(tmp_path: Path, base: Path) -> None:
    pytest.importorskip("peft")
    task = _task(tmp_path, {"path": str(base), "lora": LORA})
    total, weight, metrics = task.loss(task.build_model(), _batch(task))
    assert (total / weight).item() == pytest.approx(0.6931472, abs=1e-6)
    assert {name: float(one) for name, one in metrics.items()} == pytest.approx(dict.fromkeys(metrics, 0.0), abs=1e-6)


def test_label_smoothing_is_the_expected_loss_of_exchanged_pairs() -> None:
    margins = torch.tensor([-2.0, 0.0, 3.0])
    plain, smooth = DpoConfig(beta=0.7), DpoConfig(beta=0.7, label_smoothing=0.25)
    expected = 0.75 * preference_losses(margins, plain) + 0.25 * preference_losses(-margins, plain)
    torch.testing.assert_close(preference_losses(margins, smooth), expected)


def _texts(sample: dict[str, torch.Tensor]) -> list[tuple[str, str]]:
    def text(values: torch.Tensor) -> str:
        return "".join("." if one in (0, -100) else "#" if one == 256 else chr(one) for one in values.tolist())

    return [(text(t), text(n)) for t, n in zip(sample["tokens"], sample["labels"], strict=True)]


SMALL = {"config": small_config("llama"), "lora": LORA}


@pytest.mark.parametrize(
    ("record", "pair"),
    [
        (
            {"prompt": "a", "chosen": "bcd", "rejected": "x"},
            [("abcd........", "bcd#........"), ("ax..........", "x#..........")],
        ),
        (
            {"chosen": "is it? yes", "rejected": "is it? no"},
            [("is it? yes..", "..... yes#.."), ("is it? no...", "..... no#...")],
        ),
        ({"chosen": "yes", "rejected": "no"}, [("yes.........", "es#........."), ("no..........", "o#..........")]),
    ],
    ids=["prompt", "what both begin with", "no prompt"],
)
def test_a_pair_is_the_prompt_with_each_answer(tmp_path: Path, record: Any, pair: list[tuple[str, str]]) -> None:
    assert _texts(_task(tmp_path, SMALL, record, seq_len=12).build_dataset("train")[0]) == pair


def test_rows_of_parquet_are_lines(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "pairs.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(PAIRS), file)
    lines, rows = (_task(tmp_path, SMALL, **more).build_dataset("train") for more in ({}, {"paths": [str(file)]}))
    assert len(lines) == len(rows) == 3
    assert [_texts(rows[number]) for number in range(3)] == [_texts(lines[number]) for number in range(3)]


def test_a_pair_of_which_one_answer_is_cut_off_is_left_out(tmp_path: Path) -> None:
    late = {"prompt": "abcdefgh", "chosen": "i", "rejected": "j"}
    assert len(_task(tmp_path, SMALL, late, PAIRS[1], seq_len=6).build_dataset("train")) == 1
    with pytest.raises(CorpusTooSmallError, match=r"1 lines, and none .* both answers within model\.seq_len 6"):
        _task(tmp_path, SMALL, late, seq_len=6).build_dataset("train")


def test_both_answers_of_a_line_are_on_the_same_side_of_the_split(tmp_path: Path) -> None:
    records = [{"prompt": "p", "chosen": f"yes{number}", "rejected": f"no{number}"} for number in range(40)]
    task = _task(tmp_path, SMALL, *records, validation_fraction=0.5)
    sizes = [len(task.build_dataset(name)) for name in ("train", "validation")]
    assert sum(sizes) == 40 and min(sizes) > 5
    data = task.build_dataset("validation")
    for number in range(sizes[1]):
        (chosen, _), (rejected, _) = _texts(data[number])
        assert chosen.strip(".").removeprefix("pyes") == rejected.strip(".").removeprefix("pno")


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "a", "chosen": "b"}',
        '{"prompt": "a", "chosen": "b", "rejected": ["c"]}',
        '{"chosen": [], "rejected": []}',
    ],
)
def test_a_line_that_is_no_preference_is_named(tmp_path: Path, line: str) -> None:
    task = _task(tmp_path, SMALL)
    (tmp_path / "pairs.jsonl").write_text(line)
    with pytest.raises(
        DataError, match=r"pairs\.jsonl, line 1 has the keys .* A line is \{\"prompt\": text, \"chosen\""
    ):
        task.build_dataset("train")


def test_with_max_tokens_a_pair_is_as_long_as_its_longer_answer(tmp_path: Path) -> None:
    data = _task(tmp_path, SMALL, max_tokens=64).build_dataset("train")
    assert data.tokens_per_micro_batch == 64
    assert [list(data[number]["tokens"].shape) for number in range(3)] == [[2, 12], [2, 4], [2, 11]]
    assert data.lengths.tolist() == [24, 8, 22]


def test_a_spec_has_the_keys_of_the_task() -> None:
    document: dict[str, Any] = {"task": DPO_TASK, "stop": {"steps": 1}, "model": {"path": "/m", "dpo": {"beta": 0.2}}}
    document["data"] = {"paths": ["/a.jsonl"]}
    assert parse_spec(document).task == DPO_TASK
    for changes, words in (
        ({"data": {}}, r"data\.paths"),
        ({"model": {"config": small_config("llama")}}, "preferences need a model that gives answers already"),
        ({"model": {"path": "/m", "dpo": {"loss": "kto"}}}, r"model\.dpo\.loss.*sigmoid"),
        ({"model": {"path": "/m", "dpo": {"loss": "ipo", "label_smoothing": 0.1}}}, "has none"),
        ({"init_from": "/other"}, "the reference of preferences is the model in"),
        ({"task": SFT_TASK}, r"model\.dpo: unknown key"),
    ):
        with pytest.raises(SpecError, match=words):
            parse_spec({**document, **changes})


def test_a_second_model_has_no_pipeline_and_adapters_have_one(base: Path) -> None:
    document: dict[str, Any] = {"task": DPO_TASK, "stop": {"steps": 1}, "data": {"paths": ["/a.jsonl"]}}
    document |= {"parallelism": {"pp": 2}, "elasticity": {"max_workers": 2}, "model": {"path": str(base)}}
    with pytest.raises(SpecError, match=r"pp is 2, but .* the reference is a second one; with model\.lora it is none"):
        parse_spec(document)
    assert parse_spec({**document, "model": {"path": str(base), "lora": LORA}})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": {"global_size": 4, "micro_size": 2}}, r"batch\.micro_size is 2, and with data\.max_tokens"),
        ({"data": {"max_tokens": 100}}, r"data\.max_tokens 100 is less than model\.seq_len = 256"),
        ({"data": {"packing": True}}, r"packed samples all have model\.seq_len tokens"),
        ({"parallelism": {"pp": 2}, "elasticity": {"max_workers": 2}}, "hand over tensors of one shape"),
    ],
)
def test_what_does_not_fit_a_budget_of_tokens_is_refused(changes: dict[str, Any], words: str) -> None:
    document: dict[str, Any] = {"task": SFT_TASK, "stop": {"steps": 1}, "batch": {"global_size": 4, "micro_size": 1}}
    document["model"] = {"config": small_config("llama")}
    data = {"paths": ["/a.jsonl"], "max_tokens": 512}
    assert parse_spec({**document, "data": data})
    with pytest.raises(SpecError, match=words):
        parse_spec({**document, **changes, "data": {**data, **changes.get("data", {})}})


def test_an_answer_may_be_as_long_as_its_budget(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"prompt": "a", "completion": "bcdefghijk"}) + "\n")
    data = {"paths": [str(file)], "cache_dir": str(tmp_path), "tokenizer": "bytes", "validation_fraction": 0}
    task = SupervisedFineTuning({"config": small_config("llama"), "seq_len": 8}, {**data, "max_tokens": 8}, 0)
    samples = task.build_dataset("train")
    assert samples[0]["tokens"].shape == (8,)
    assert samples.lengths is not None and samples.lengths.tolist() == [8]


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "adapters"])
def test_no_router_is_noisy_in_training(tmp_path: Path, lora: Any) -> None:
    """Neither the model's nor the reference's: before the first step they are equal, so the loss is ln 2."""
    if lora is not None:
        pytest.importorskip("peft")
    settings = {**small_config("mixtral"), "router_jitter_noise": 0.5}
    network = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**settings))
    network.save_pretrained(tmp_path / "model")
    task = _task(tmp_path, {"path": str(tmp_path / "model"), "lora": lora})
    model = task.build_model()
    if model.reference is not None:
        model.network.load_state_dict(model.reference.state_dict())
    total, weight, _ = task.loss(model.train(), _batch(task))
    assert (total / weight).item() == pytest.approx(0.6931472, abs=1e-6)
    assert model.network.training and (model.reference is None or not model.reference.training)

"""Which optimizers a spec may name, what it may say of each, and which group a parameter belongs to."""

from typing import Any

import pytest

from shoal_workers.contract.checks.spec_errors import SpecError, parse_spec
from shoal_workers.contract.optimizers import NAMED, OptimizerGroup, OptimizerSpec, describe_unmatched, find_group
from shoal_workers.contract.spec import JobSpec

LEAST: dict[str, Any] = {"stop": {"steps": 5}, "data": {"corpus": "python-stdlib"}}
OF_RELEASE_0_2 = {
    "name": "adamw",
    "lr": 3e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
    "fused": "auto",
}


def test_the_document_of_an_adamw_is_that_of_earlier_releases() -> None:
    assert parse_spec(LEAST).optimizer.model_dump(mode="json") == OF_RELEASE_0_2
    assert parse_spec({**LEAST, "optimizer": OF_RELEASE_0_2}).optimizer == OptimizerSpec()


@pytest.mark.parametrize("name", [*NAMED, "torch.optim.RAdam", "torch.optim:Rprop", "package.module.Class", "one:Two"])
def test_a_document_has_what_its_optimizer_reads_and_can_be_submitted_again(name: str) -> None:
    groups = [{"match": "embed.*", "lr_factor": 0.5}]
    spec = parse_spec({**LEAST, "optimizer": {"name": name, "groups": groups}})
    document = spec.model_dump(mode="json")
    assert parse_spec(document) == spec == JobSpec.model_validate_json(spec.model_dump_json())
    assert ("fused" in document["optimizer"]) is (name == "adamw")
    assert ("beta1" in document["optimizer"]) is (name in ("adamw", "adam", "muon"))


@pytest.mark.parametrize(
    ("name", "decay"), [("adamw", 0.1), ("lion", 0.1), ("sgd", 0.0), ("torch.optim.AdamW", 0.01), ("my.Own", 0.0)]
)
def test_the_weight_decay_that_is_not_set_depends_on_the_name(name: str, decay: float) -> None:
    assert OptimizerSpec.model_validate({"name": name}).weight_decay == decay
    assert OptimizerSpec.model_validate({"name": name, "weight_decay": 0.3}).weight_decay == 0.3


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (
            {"name": "sgd", "beta1": 0.9},
            "optimizer.beta1 is not a setting of sgd. It has lr, weight_decay, clip_norm, ema_decay, groups, and in "
            "optimizer.args: momentum, dampening, nesterov, foreach, maximize.",
        ),
        ({"name": "lion", "fused": True}, "optimizer.fused is not a setting of lion."),
        ({"name": "sgd", "momentum": 0.9}, 'optimizer: {"name": "sgd", "args": {"momentum": ...}}'),
        ({"name": "sgd", "args": {"momentun": 1}}, "args.momentun is not an argument of sgd. Did you mean momentum?"),
        ({"name": "torch.optim.RAdam", "args": {"rho": 1}}, "optimizer.args.rho is not an argument of torch.optim."),
        ({"args": {"amsgrad": True}}, "optimizer.args is not a setting of adamw."),
        ({"name": "adamm"}, "optimizer.name 'adamm' is not known. Did you mean adam? Use one of adamw, adam, sgd"),
        ({"name": "torch.optim.Adam2"}, "'torch.optim.Adam2' is not known. Did you mean adam?"),
        ({"name": "torch.optim.LBFGS"}, "it computes the loss several times in each step"),
        ({"name": "torch.optim.Muon"}, "optimizer.name: muon has AdamW for all other parameters"),
        ({"name": "torch.optim.Rprop", "weight_decay": 0.1}, "optimizer.weight_decay is not a setting of torch.optim."),
        ({"groups": [{"match": "a"}]}, "optimizer.groups.0: the group 'a' sets nothing."),
        ({"groups": [{"match": "a", "lr": 1, "frozen": True}]}, "the group 'a' is frozen, so it has no lr."),
        ({"groups": [{"match": "a", "lr": 1, "lr_factor": 2}]}, "has lr and lr_factor. Set one of them."),
        ({"groups": [{"match": "a", "muon": False}]}, "optimizer.groups.0.muon is set, and optimizer.name is adamw."),
        ({"groups": [{"match": "a", "rate": 1}]}, "optimizer.groups.0.rate: unknown key 'rate'."),
        (
            {"name": "torch.optim.Rprop", "groups": [{"match": "a", "weight_decay": 1}]},
            "optimizer.groups.0.weight_decay: torch.optim.Rprop has no weight decay.",
        ),
    ],
)
def test_what_an_optimizer_does_not_have_is_refused_with_what_it_has(optimizer: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_spec({**LEAST, "optimizer": optimizer})
    assert words in str(error.value)


def test_an_average_is_in_the_document_only_if_there_is_one() -> None:
    spec = parse_spec({**LEAST, "optimizer": {"ema_decay": 0.999}})
    assert spec.optimizer.model_dump(mode="json") == {**OF_RELEASE_0_2, "ema_decay": 0.999}
    assert parse_spec(spec.model_dump(mode="json")) == spec
    with pytest.raises(SpecError, match="ema_decay: must be less than 1"):
        parse_spec({**LEAST, "optimizer": {"ema_decay": 1.0}})


NAMES = ["embed.weight", "blocks.0.up.weight", "blocks.0.up.bias", "blocks.1.up.weight", "head.weight"]


def _groups(*patterns: str) -> tuple[OptimizerGroup, ...]:
    return tuple(OptimizerGroup(match=pattern, lr=0.1) for pattern in patterns)


def test_a_parameter_belongs_to_the_first_group_that_matches() -> None:
    groups = _groups("blocks.0.*", "*.bias", "*.up.*")
    assert [find_group(groups, name) for name in NAMES] == [None, 0, 0, 2, None]


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (("blocks.*", "head.weight"), ""),
        (("head", "blocks.*"), "optimizer.groups.0.match 'head' matches no parameter of the model. The nearest names "),
        (("head*", "block.0.up.weight"), "The nearest names are 'blocks.0.up.weight', "),
        (
            ("*.weight", "head.*"),
            "optimizer.groups.1.match 'head.*': every parameter that it matches ('head.weight') belongs to a group "
            "before it.",
        ),
    ],
)
def test_a_pattern_without_a_parameter_is_named_with_the_nearest_names(patterns: tuple[str, ...], words: str) -> None:
    found = describe_unmatched(_groups(*patterns), NAMES)
    assert words in found and bool(words) is bool(found)

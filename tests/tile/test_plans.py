"""Plans: complete when they are made, and never changed; what is undecided is no plan."""

from dataclasses import FrozenInstanceError, fields

import programs_hopper
import pytest

from tvm_axe import tile
from tvm_axe.tile.plans import Decisions, Plan
from tvm_axe.tile.targets.cuda.specialized.plan import SpecializedPlan
from tvm_axe.tile.targets.cuda.uniform.plan import UniformPlan
from tvm_axe.tile.targets.llvm.plan import CpuPlan

TARGETS = {"llvm": CpuPlan, "cuda:sm_80": UniformPlan, "cuda:sm_90a": SpecializedPlan}


@pytest.fixture(scope="module", params=TARGETS)
def plan(request):
    made = tile.plan(programs_hopper.matmul(128, 128, 64, dtype="float16"), request.param)
    assert type(made) is TARGETS[request.param]
    return made


def test_no_field_can_be_left_out(plan):
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    assert type(plan)(**values).explain() == plan.explain()
    for name in values:
        with pytest.raises(TypeError, match=name):
            type(plan)(**{other: value for other, value in values.items() if other != name})


def test_nothing_is_decided_afterwards(plan):
    for field in fields(plan):
        with pytest.raises(FrozenInstanceError):
            setattr(plan, field.name, None)


def test_decisions_already_made_stay_as_they_are():
    program = tile.read(programs_hopper.matmul(128, 128, 64))
    decisions = Decisions(program)
    decisions.add("grid", "one block a tile", "there is one")
    plan = Plan(program=program, target=None, decisions=decisions.made())
    decisions.add("grid", "persistent", "on second thought")
    assert len(plan.decisions) == 1 and len(decisions.made()) == 2 and not plan.overlaps

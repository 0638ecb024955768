"""What a program switches while it trains, such as frozen parameters, comes back when it is resumed."""

from __future__ import annotations

import pytest
import torch
from tests.integrations.lightning.program import new_directory
from tests.sweep.lightning_programs import FINETUNING
from tests.sweep.lightning_runs import Interruption, Program

from holdfast.integrations.lightning.averages import ModuleSwitches

pytestmark = [
    pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist"),
    pytest.mark.filterwarnings("ignore:Found .* in eval mode at the start of training"),
]

SETUPS = [name for name in FINETUNING if "EMA" not in name and not FINETUNING[name].refused]
SOME = {
    "BackboneFinetuning without batch norm": (7,),
    "BaseFinetuning, in two stages": (12,),
    "modes by hand": (7,),
}


@pytest.mark.parametrize("setup", SETUPS)
def test_after_the_unfreeze(setup: str, every: bool) -> None:
    if not every and setup not in SOME:
        return
    whole = Program(new_directory(), setup, "shuffled")
    whole.fit()
    last = whole.trainer.global_step
    for step in range(1, last) if every else SOME[setup]:
        directory = new_directory()
        assert Program(directory, setup, "shuffled", every=step).fit(Interruption("error", step)) == 1
        resumed = Program(directory, setup, "shuffled", seed=2)
        resumed.fit()
        assert resumed.final() == whole.final(), f"interrupted after step {step}"


def test_a_group_that_only_training_adds_is_refused() -> None:
    directory = new_directory()
    assert Program(directory, "parameter group by hand", "shuffled", every=7).fit(Interruption("error", 7)) == 1
    with pytest.raises(ValueError, match="different number of parameter groups"):
        Program(directory, "parameter group by hand", "shuffled").fit()


def test_what_an_author_changes_between_two_starts_stays() -> None:
    def started() -> tuple[torch.nn.Sequential, ModuleSwitches]:
        module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1))
        module[0].requires_grad_(requires_grad=False)
        return module, ModuleSwitches(module)

    first, switches = started()
    assert switches.switched() == ""
    first[0].requires_grad_(requires_grad=True)
    first[1].eval()
    saved = switches.switched()

    second, switches = started()
    second[2].requires_grad_(requires_grad=False)  # by hand, before it is resumed
    switches = ModuleSwitches(second)
    switches.restore(saved)
    assert [parameter.requires_grad for parameter in second.parameters()] == [True] * 4 + [False] * 2
    assert [part.training for part in second] == [True, False, True]
    assert switches.switched() == saved

    # Fitted once more in the same process, which begins with everything switched: a third process needs it all.
    switches = ModuleSwitches(second)
    switches.restore(saved)
    assert switches.switched() == saved

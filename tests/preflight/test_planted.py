"""Each planted defect is found by its check, and no longer found once the proposed fix is applied."""

from __future__ import annotations

import pytest
from preflight_cases import make_text_trainer, make_trainer
from preflight_defects import DEFECTS, Planted

from safetrain import check
from safetrain.preflight import CHECKS, FAIL, PASS, SKIP, WARN


@pytest.mark.parametrize("planted", DEFECTS, ids=lambda planted: planted.name)
def test_a_defect_is_found_and_its_fix_works(planted: Planted) -> None:
    found = check(planted.build(True), only=planted.check, budget=30)[planted.check]
    assert found.status == planted.status, found.reason
    assert planted.says in found.reason
    assert planted.fix in found.fix
    report = check(planted.build(False), only=planted.check, budget=30)
    assert report[planted.check].status in (PASS, SKIP), report[planted.check].reason
    assert report.passed


def test_every_check_has_a_planted_defect() -> None:
    assert {each.name for each in CHECKS} - {planted.check for planted in DEFECTS} == {"lint"}


@pytest.mark.parametrize("build", [make_trainer, make_text_trainer])
def test_a_healthy_trainer_passes_every_check(build) -> None:
    report = check(build(), budget=30)
    assert report.passed
    assert [checked.name for checked in report.with_status(WARN)] == [] or report.with_status(WARN)[0].name == "lint"
    assert [checked.name for checked in report.checks] == [each.name for each in CHECKS]
    assert all(checked.fix for checked in report.checks if checked.status in (WARN, FAIL))

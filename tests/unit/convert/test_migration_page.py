"""The pages for users of other frameworks have the converter's tables."""

from pathlib import Path

import pytest

from lockstep.convert.migration_page import migration_table, updated_page

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("framework", ["openrlhf", "verl", "trl", "vlm-r1"])
def test_the_table_of_a_page_is_current(framework: str) -> None:
    page = (DOCS / f"from-{framework}.md").read_text()
    assert page == updated_page(page, framework), "run: python -m lockstep.convert.migration_page docs"


def test_a_row_names_options_fields_and_remark() -> None:
    table = migration_table("openrlhf")
    assert "| `--algo.kl.init_coef` (`--init_kl_coef`) | `loss.kl.coefficient` | 0.01 in OpenRLHF, 0 here |" in table
    assert "none needed" in table and "| none |" in table


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="converter's table"):
        updated_page("# From TRL\n", "trl")

"""The values of secret and unknown variables are not printed."""

from dataclasses import astuple

from hypothesis import given
from hypothesis import strategies as st

from lockstep.doctor.environment.environment_lint import SHELL_ROLE, ProcessEnvironment, lint_environments
from lockstep.doctor.environment.variable_table import load_variables

SECRET = "Zq7Yw2Xe9Rt4Uv1P"
TABLE = load_variables()
SECRETS = ["VLLM_API_KEY", "NCCL_TOKEN", "WANDB_API_KEY", "NCCL_SOCKET_IFNMAE", "VLLM_FOO", "MY_PASSWORD", "nccl_debug"]


def test_values_of_unknown_and_secret_variables_are_not_printed() -> None:
    values = dict.fromkeys(SECRETS, SECRET)
    places = [
        ProcessEnvironment("a", values),
        ProcessEnvironment("b", dict.fromkeys(SECRETS, SECRET + "x")),
        ProcessEnvironment("", values, SHELL_ROLE),
    ]
    for launcher in (None, "ray"):
        assert SECRET not in str([astuple(each) for each in lint_environments(places, launcher=launcher)])


@given(st.dictionaries(st.sampled_from(sorted(TABLE.known)), st.just(f"hf_{SECRET}{SECRET}"), min_size=1))
def test_a_value_with_the_form_of_a_token_is_not_printed(values: dict[str, str]) -> None:
    other = dict.fromkeys(values, "1")
    assert SECRET not in str(
        [astuple(each) for each in lint_environments([ProcessEnvironment("a", values), ProcessEnvironment("b", other)])]
    )

from lockstep.api.batches import Scores as Scores
from lockstep.api.batches import pack as pack
from lockstep.api.batches import score as score
from lockstep.api.function_source import FunctionNotCarried as FunctionNotCarried
from lockstep.api.loaded_policy import LoadedPolicy as LoadedPolicy
from lockstep.api.loaded_policy import generate as generate
from lockstep.api.loaded_policy import load_policy as load_policy
from lockstep.api.run_result import Result as Result
from lockstep.api.training import train as train
from lockstep.config.errors import ConfigError as ConfigError
from lockstep.data.dataset_rows import DataError as DataError
from lockstep.report.step_callbacks import STOP as STOP
from lockstep.report.step_callbacks import CallbackFailed as CallbackFailed
from lockstep.rewards.scoring_messages import RewardError as RewardError
from lockstep.run.errors import NotStarted as NotStarted
from lockstep.run.errors import RunRefused as RunRefused

__version__: str

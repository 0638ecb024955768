from .registry import Outcome as Outcome
from .registry import RunContext as RunContext
from .schema import Config as Config
from .schema import Section as Section

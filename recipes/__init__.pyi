from .context import Outcome as Outcome
from .context import RunContext as RunContext
from .schema import Config as Config
from .schema import Section as Section

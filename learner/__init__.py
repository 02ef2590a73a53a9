"""SFT and GRPO on DeepSpeed; publishes weights.

Invariants: a scored group leaves once, with its ledger word, in the lineage that survives; a step's gradient does not
depend on how it is split over ranks and micro-batches; a fault of the infrastructure is neither rewarded nor punished;
published weights are base plus delta, never merged in place. Importing this package needs neither torch nor DeepSpeed.
"""

from learner.config import LearnerConfig
from learner.errors import CheckpointError, NotFiniteError, PublishError

__all__ = ["CheckpointError", "LearnerConfig", "NotFiniteError", "PublishError"]

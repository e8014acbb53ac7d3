"""One model of an engine's step, for costs and predictions alike.

    step = token_s + sequence_s * sequences + context_token_s * tokens of context + prefill_token_s * tokens of prefill

Engines' agents learn the first three from counters and report them, with a prefill rate. Each replica's own first
tokens correct the last one (`prefill_pace`).
"""

from typing import NamedTuple

from router.core.fleet import EngineReport, Replica
from router.core.schedule.cost_settings import CostSettings
from router.core.schedule.load_snapshot import ReplicaLoad


class StepModel(NamedTuple):
    """What a step takes by itself, and for each sequence that decodes, token of their context, and token of prefill.

    The first three are 0.0 until any replica has measured them.
    """

    token_s: float
    sequence_s: float
    context_token_s: float
    prefill_token_s: float

    def decode_s(self, sequences: int, context_tokens: float) -> float:
        """A step that decodes so many sequences, with so much context in all."""
        return self.token_s + self.sequence_s * sequences + self.context_token_s * context_tokens


def step_model(replica: Replica, middle: EngineReport, costs: CostSettings) -> StepModel:
    """The step of a replica: as it has measured it, else the fleet's, else a guess for prefill alone."""
    decode = replica.report if replica.report.token_s else middle
    token_s, sequence_s, context_token_s = decode.token_s, decode.sequence_s, decode.context_token_s
    return StepModel(token_s, sequence_s, context_token_s, 1 / prefill_rate(replica, middle, costs))


def prefill_rate(replica: Replica, middle: EngineReport, costs: CostSettings) -> float:
    """Tokens per second: the replica's own measured rate, shrunk towards the fleet's; the default before any."""
    fleet = middle.prefill_tokens_per_s or costs.prefill_tokens_per_s
    own = replica.report.prefill_tokens_per_s or fleet
    return costs.own_rate_share * own + (1 - costs.own_rate_share) * fleet


def running_step_s(step: StepModel, load: ReplicaLoad) -> float:
    """One step of what decodes at a replica now; 0.0 where nothing does."""
    return step.decode_s(load.decoding, load.context_in_use) if load.decoding else 0.0


def batch_s(step: StepModel, load: ReplicaLoad, prompt_tokens: int) -> float:
    """Seconds by which a step of a replica's batch and one sequence more are longer, summed over all who decode in it.

    Each of the others waits for the new sequence, and that one for all others.
    """
    own_s = step.sequence_s + step.context_token_s * prompt_tokens
    return load.all_in_flight * (own_s + step.sequence_s) + step.context_token_s * load.context_in_use

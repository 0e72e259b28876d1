"""What people who launch Horovod really meet. The order is the rank: of two that match, the first is the cause."""

from __future__ import annotations

from hvdtrain.diagnosis.models import Rule
from hvdtrain.diagnosis.rules import gpu, network, python, symptoms, system

RULES: tuple[Rule, ...] = (
    *network.SSH,
    *network.START,
    *python.RULES,
    *gpu.RULES,
    *network.RDMA,
    *network.NETWORK,
    *system.RULES,
)
# Only where none of the above is found, and no rank has an exception of its own.
SYMPTOMS: tuple[Rule, ...] = symptoms.RULES

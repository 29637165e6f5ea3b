"""Memory of a training run, counted before anything is allocated."""

from mpx.tools.plan.compare_plans import PlanComparison as PlanComparison
from mpx.tools.plan.compare_plans import compare_plans as compare_plans
from mpx.tools.plan.memory_plan import MemoryPlan as MemoryPlan
from mpx.tools.plan.memory_plan import memory_plan as memory_plan
from mpx.tools.plan.rows import PlanRow as PlanRow

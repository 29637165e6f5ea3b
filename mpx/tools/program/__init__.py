"""Read the compiled program of a step, for this machine or for one that is not here."""

from mpx.tools.program.findings import Finding as Finding
from mpx.tools.program.kernels import Kernel as Kernel
from mpx.tools.program.measured import MeasuredKernel as MeasuredKernel
from mpx.tools.program.measured import MeasuredStep as MeasuredStep
from mpx.tools.program.step_report import StepReport as StepReport
from mpx.tools.program.step_report import step_report as step_report
from mpx.tools.program.targets import TARGETS as TARGETS
from mpx.tools.program.targets import Target as Target
from mpx.tools.program.targets import target_devices as target_devices

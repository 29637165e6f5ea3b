"""Say what this machine can do for mixed precision, and whether mpx is exact on it: `mpx.doctor.examine()`.

The command line has it as `mpx doctor`.
"""

from mpx.tools.doctor.examine import Diagnosis as Diagnosis
from mpx.tools.doctor.examine import Problem as Problem
from mpx.tools.doctor.examine import examine as examine

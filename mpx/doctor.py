"""Say what this machine can do for mixed precision, and whether mpx is exact on it: `mpx.doctor.examine()`.

The command line has it as `mpx doctor`.
"""

from mpx.tools.doctor import Check as Check
from mpx.tools.doctor import Diagnosis as Diagnosis
from mpx.tools.doctor import Problem as Problem
from mpx.tools.doctor import Product as Product
from mpx.tools.doctor import Recommendation as Recommendation
from mpx.tools.doctor import examine as examine

"""Everything that is not training: plans, monitoring, advice, the doctor, pictures and the command line."""

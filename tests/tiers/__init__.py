"""`make test`: the tiers, what each costs, and the rule that under CI=true no test is skipped."""

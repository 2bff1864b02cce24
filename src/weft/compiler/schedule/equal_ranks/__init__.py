"""Equal ranks are planned once: which ranks are alike, and a plan like that of another rank."""

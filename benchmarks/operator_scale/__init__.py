"""Scale and cost of the operator, measured on a control plane of its own."""

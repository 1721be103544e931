"""DeepSpeed's ZeRO: its share of a prediction. Formulas follow the internals of DeepSpeed 0.19.8."""

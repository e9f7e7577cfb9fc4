"""Autocast, the fp16 loss scaler, and float32 islands in a model that computes in half precision."""

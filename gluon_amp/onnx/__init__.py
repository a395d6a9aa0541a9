"""Export of networks to ONNX files."""

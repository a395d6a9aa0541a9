"""Networks as ONNX files."""

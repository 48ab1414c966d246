"""span_attention: attention of every query over one prefix span and one own span, without a mask matrix."""

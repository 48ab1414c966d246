"""layer_end: what ends a layer with a dense MLP and routed experts side by side."""

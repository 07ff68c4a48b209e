"""Where engines cut a layer's matrices over tensor-parallel ranks."""

CUT_IN_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj")
CUT_IN_COLUMNS = ("o_proj", "down_proj")

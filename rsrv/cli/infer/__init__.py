"""``rsrv infer``: where its inputs come from, how they are sent, where the outputs go."""

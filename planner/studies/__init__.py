"""One question asked many times: extremes that fit, scaling, cost, plans side by side."""

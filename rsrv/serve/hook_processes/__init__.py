"""Hooks in processes of their own (``hooks.mode: process``): those of one model, and what runs inside of them."""

"""Names that files have which hold a whole model fused by an earlier version."""


class _Gone:
    def __new__(cls, *args, **kwargs):
        raise RuntimeError(
            "this file holds a whole model as fuse_ changed it in an earlier version, which put "
            "other layers into it. Load it with that version, call unfuse_ and save it again, or "
            "load its state_dict into the model"
        )


class FusedActivation(_Gone):
    """What stood for an activation that the layer before it applied."""


class FusedConv1D(_Gone):
    """What stood for transformers' Conv1D."""

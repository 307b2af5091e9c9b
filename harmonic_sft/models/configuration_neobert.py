"""The configuration of NeoBERT, which reads the published config.json as it stands."""

from typing import Any

from transformers import PreTrainedConfig


class NeoBERTConfig(PreTrainedConfig):
    """Sizes and constants of a NeoBERT encoder; the defaults are those of chandar-lab/NeoBERT.

    Args:
        vocab_size: Tokens in the vocabulary.
        hidden_size: Width of the residual stream, a multiple of `num_attention_heads`.
        num_hidden_layers: Blocks.
        num_attention_heads: Heads per block, each of an even width, as RoPE turns pairs.
        intermediate_size: Width of the plain MLP of the same size; the SwiGLU matrices are 2 / 3 as
            wide, rounded up to a multiple of 8.
        max_position_embeddings: Longest sequence in tokens. No weight depends on it.
        rope_theta: Base of the RoPE frequencies; a constant of the published code, not of its file.
        norm_eps: Added to the mean square in every RMSNorm.
        pad_token_id: Its embedding row gets no gradient.
        tie_word_embeddings: False in the published checkpoint, whose decoder has its own weight.
        embedding_init_range: New embeddings are uniform in plus or minus this.
        decoder_init_range: New linear weights are uniform in plus or minus this.
        classifier_init_range: Kept for the published file; no class here reads it.
        max_length: The published name of `max_position_embeddings`. Not kept, because transformers
            takes it for a generation setting and then refuses to save.
        dim_head: Published, and checked against `hidden_size // num_attention_heads`. Not kept.

    Raises:
        ValueError: If the heads do not divide `hidden_size` into even parts, or `dim_head` differs.

    Source:
        Le Breton et al. 2025, NeoBERT: A Next-Generation BERT, arXiv:2502.19587; config.json of
        chandar-lab/NeoBERT at 5424c8efeea6491b151d62dee55a752165407430.
    """

    model_type = "neobert"

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 28
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = False
    embedding_init_range: float = 0.02
    decoder_init_range: float = 0.02
    classifier_init_range: float = 0.02

    def __post_init__(
        self, max_length: int | None = None, dim_head: int | None = None, **kwargs: Any
    ) -> None:
        if max_length is not None:
            self.max_position_embeddings = max_length
        head_dim, remainder = divmod(self.hidden_size, self.num_attention_heads)
        if remainder or head_dim % 2:
            raise ValueError(
                f"hidden_size: expected an even multiple of num_attention_heads="
                f"{self.num_attention_heads}, got {self.hidden_size}"
            )
        if dim_head is not None and dim_head != head_dim:
            raise ValueError(
                f"dim_head: expected hidden_size // num_attention_heads = {head_dim}, "
                f"got {dim_head}. Leave it out"
            )
        # The published file carries the arguments of the call that made it. Saved again, they would
        # say nothing, and its auto_map would name a model.py that does not travel with this class.
        for name in ("kwargs", "pretrained_model_name_or_path", "trust_remote_code"):
            kwargs.pop(name, None)
        config_class = (kwargs.get("auto_map") or {}).get("AutoConfig", "")
        if config_class.split("--")[-1] == "model.NeoBERTConfig":
            kwargs.pop("auto_map")
        super().__post_init__(**kwargs)

"""Small tokenizers of the kinds that models come with, trained on a few lines."""

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from engine.token_bytes import SPACE_MARK

CORPUS = [
    "the user said hello to the assistant",
    "<|im_start|> <|im_end|> <s> </s> [INST] a tool call, then the end",
] * 3
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA2 = ("<unk>", "<s>", "</s>")


def special(text: str, *, lstrip: bool = False, rstrip: bool = False, normalized: bool = False) -> AddedToken:
    return AddedToken(text, special=True, lstrip=lstrip, rstrip=rstrip, normalized=normalized)


def byte_level(*tokens: AddedToken, add_prefix_space: bool = False) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_tokens([*tokens, AddedToken("<think>", special=False)])
    return backend


def chatml() -> Tokenizer:
    return byte_level(*map(special, CHATML))


def sentencepiece(*tokens: AddedToken) -> Tokenizer:
    """Special tokens first and bytes next, as in Llama 2; merges learned over words that begin with the mark."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    learned = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    vocab = {token: id for id, token in enumerate([*LLAMA2, *(f"<0x{byte:02X}>" for byte in range(256)), *learned])}
    merges = [(token[:cut], token[cut:]) for token in learned for cut in range(1, len(token))]
    merges = [pair for pair in merges if pair[0] in vocab and pair[1] in vocab]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_tokens(list(tokens) or [special(token) for token in LLAMA2])
    return backend


def prepended(*tokens: AddedToken) -> Tokenizer:
    backend = sentencepiece(*tokens)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), normalizers.Replace(" ", SPACE_MARK)])
    return backend


def metaspace(scheme: str) -> Tokenizer:
    backend = sentencepiece()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return backend


def composing() -> Tokenizer:
    backend = byte_level(special("<s>", normalized=True), special("<e>"))
    backend.normalizer = normalizers.NFKC()
    return backend


def stripping() -> Tokenizer:
    return byte_level(
        special("<s>", rstrip=True),
        special("</s>", lstrip=True),
        special("<both>", lstrip=True, rstrip=True),
        AddedToken("END", special=True, single_word=True, normalized=False),
        special("<s><s>"),
    )


VOCABULARIES: dict[str, Callable[[], Tokenizer]] = {
    "byte level": chatml,
    "byte level, space in front": lambda: byte_level(*map(special, CHATML), add_prefix_space=True),
    "blanks, words, nested": stripping,
    "prepended": prepended,
    "prepended, normalized": lambda: prepended(*(special(token, normalized=True) for token in LLAMA2)),
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "metaspace never": lambda: metaspace("never"),
    "composing": composing,
}

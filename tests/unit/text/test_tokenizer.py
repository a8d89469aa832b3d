import json
import subprocess
import sys

import pytest
from transformers import PreTrainedTokenizer

from penstock.core import ConfigError, RequestError
from penstock.text.tokenizer import Tokenizer, load_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<s>{{ m.role + ': ' + m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
TALK = [{"role": "user", "content": "turn the wheel"}]


@pytest.fixture
def folder(bytes_tokenizer, tmp_path):
    bytes_tokenizer._inner.save_pretrained(tmp_path)
    return tmp_path


def test_loads_encodes_and_decodes(folder, bytes_tokenizer):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("naïve 🙂</s>")
    assert ids == bytes_tokenizer.encode("naïve 🙂</s>")
    assert ids[-1] == tokenizer.eos_token_ids[0]
    assert tokenizer.decode(ids) == "naïve 🙂"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "naïve 🙂</s>"
    assert len(tokenizer) == max(tokenizer.encode("<tool>")) + 1


def test_special_tokens_are_added_unless_told_otherwise(bytes_tokenizer):
    from tokenizers.processors import TemplateProcessing

    inner = bytes_tokenizer._inner.__class__(
        tokenizer_object=bytes_tokenizer._backend.__class__.from_str(bytes_tokenizer._backend.to_str())
    )
    bos = inner.convert_tokens_to_ids("<s>")
    inner.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer = Tokenizer(inner)
    assert tokenizer.encode("the")[0] == bos
    assert tokenizer.encode("the")[1:] == tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.eos_token_ids == ()


@pytest.mark.parametrize(("said", "expected"), [(7, {7}), ([7, 9], {7, 9}), (None, set())])
def test_eos_of_the_generation_config_joins_the_tokenizers(folder, said, expected):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    tokenizer = load_tokenizer(folder)
    own = tokenizer.encode("</s>", add_special_tokens=False)
    assert tokenizer.eos_token_ids == tuple(sorted({*own, *expected}))


def test_says_what_to_do_without_a_tokenizer(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="not a folder"):
        load_tokenizer(tmp_path / "absent")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda folder, **options: PreTrainedTokenizer)
    monkeypatch.setattr(PreTrainedTokenizer, "is_fast", False)
    with pytest.raises(ConfigError, match="slow tokenizer"):
        load_tokenizer(tmp_path)


def test_decoding_never_cleans_up_spaces(bytes_tokenizer):
    text = "a , b . do n't"
    bytes_tokenizer._inner.clean_up_tokenization_spaces = True
    try:
        assert bytes_tokenizer.decode(bytes_tokenizer.encode(text)) == text
    finally:
        bytes_tokenizer._inner.clean_up_tokenization_spaces = False


def test_text_that_is_not_unicode_is_refused(bytes_tokenizer):
    with pytest.raises(RequestError, match=r"prompt holds U\+D800 at 2"):
        bytes_tokenizer.encode("ab\ud800")


def test_silent_tokens_are_those_that_decode_to_nothing(tokenizer):
    eos, size = tokenizer.eos_token_ids[0], len(tokenizer)
    assert [tokenizer.is_silent(eos, skip) for skip in (True, False)] == [True, False]
    assert all(tokenizer.is_silent(size + 2, skip) for skip in (True, False))
    assert tokenizer.decode([size + 2], skip_special_tokens=False) == ""
    assert not tokenizer.is_silent(size - 1, True)


def test_chat_template(folder):
    tokenizer = load_tokenizer(folder)
    with pytest.raises(ConfigError, match="no chat template"):
        tokenizer.apply_chat_template(TALK)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = load_tokenizer(folder)
    plain = "<s>user: turn the wheel\n"
    assert tokenizer.apply_chat_template(TALK, add_generation_prompt=False) == tokenizer.encode(plain)
    ids = tokenizer.apply_chat_template(TALK)
    assert tokenizer.decode(ids, skip_special_tokens=False) == plain + "assistant:"
    for bad in ([{"role": "system", "content": "x"}], [{"role": "user", "content": 7}]):
        with pytest.raises(RequestError, match="refuses them"):
            tokenizer.apply_chat_template(bad)


ENDLESS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
HUGE = "{{ 'a' * 10000000000 }}"


@pytest.mark.parametrize(
    ("template", "says"), [("{% if %}", "is not a Jinja"), (ENDLESS, "did not end"), (HUGE, "needs more memory")]
)
def test_a_template_that_is_none_or_takes_too_much_is_refused(folder, template, says, monkeypatch):
    monkeypatch.setattr("penstock.text.templates.SECONDS", 0.5)
    tokenizer = load_tokenizer(folder)
    tokenizer.use_chat_template("{{ messages[0].content }}")
    with pytest.raises(ConfigError, match=f"^chat_template {says}"):
        tokenizer.use_chat_template(template)
    assert tokenizer.render(TALK, True) == TALK[0]["content"]


def test_a_checkpoints_template_that_takes_too_much_ends_the_request(folder):
    (folder / "chat_template.jinja").write_text(HUGE)
    with pytest.raises(RequestError, match="the chat template needs more memory"):
        load_tokenizer(folder).apply_chat_template(TALK)


def test_a_template_that_wants_other_messages_is_used_all_the_same(folder):
    tokenizer = load_tokenizer(folder)
    tokenizer.use_chat_template("{{ raise_exception('only in threes') }}")
    with pytest.raises(RequestError, match="refuses them: only in threes"):
        tokenizer.apply_chat_template(TALK)


def test_no_variable_of_a_template_stands_for_the_conversation(folder):
    tokenizer = load_tokenizer(folder)
    tokenizer.use_chat_template("{{ messages[0].content }}")
    text = tokenizer.render(TALK, True, options={"conversations": [[{"role": "user", "content": "another"}]]})
    assert text == TALK[0]["content"]


def test_the_assistants_tokens_are_those_that_transformers_marks(folder):
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<s>{% if m.role == 'user' %}{{ m.content }}\n{% else %}"
        "{% generation %}{{ m.content }}</s>{% endgeneration %}{% endif %}{% endfor %}"
    )
    tokenizer = load_tokenizer(folder)
    talk = [*TALK, {"role": "assistant", "content": "it turns, wheel"}, *TALK, {"role": "assistant", "content": ""}]
    ids, marks = tokenizer.encode_marked(talk)
    theirs = tokenizer._inner.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    assert ids == theirs["input_ids"]
    assert marks == [bool(mark) for mark in theirs["assistant_masks"]]
    assert any(marks)


def test_importing_loads_neither_torch_nor_transformers():
    program = "import sys, penstock.text.detokenizer; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

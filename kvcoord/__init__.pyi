from kvcoord.client import connect as connect
from kvcoord.client import connect_blocking as connect_blocking
from kvcoord.domain import Aborted as Aborted
from kvcoord.domain import Committed as Committed
from kvcoord.index.keys import token_page_keys as token_page_keys

__version__: str

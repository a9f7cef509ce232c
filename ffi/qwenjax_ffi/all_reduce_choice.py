from typing import Literal
Algorithm = Literal["one_shot", "two_shot", "multicast"]

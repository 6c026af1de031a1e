"""A spec compared with a user's own attention: a function, FlexAttention's functions of a score and a mask, or arrays."""

from attngen.inspect.against.comparing import Against as Against
from attngen.inspect.against.comparing import Compared as Compared
from attngen.inspect.against.comparing import compare_against as compare_against
from attngen.inspect.against.own import own_of as own_of

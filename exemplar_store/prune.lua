-- requires place.lua
-- KEYS: exemplars, scores, stats, pins, islands. ARGV: shelf, low, high, cap best, newest, random, then the ids that stay
-- in any case. Answers how many went.
local caps = {tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])}
local kept = {}
for at = 7, #ARGV do kept[ARGV[at]] = true end
return cut(shelf_keys(1), ARGV[1], ARGV[2], ARGV[3], caps, kept)

-- requires place.lua
-- KEYS: exemplars, scores, stats, pins, islands. ARGV: shelf, low, high, cap best, newest, random.
-- Answers how many went.
local caps = {tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])}
return cut(shelf_keys(1), ARGV[1], ARGV[2], ARGV[3], caps)

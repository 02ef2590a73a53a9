-- requires place.lua
-- KEYS: exemplars, scores, stats, pins, islands, best. ARGV: run, shelf, exemplar id, lower end of its interval.
-- Pins what the run's report shows, as `record` does. Answers 1 when it was pinned now.
if redis.call('HEXISTS', KEYS[1], ARGV[3]) == 0 then return 0 end
return hold_best(shelf_keys(1), KEYS[6], ARGV[1], ARGV[2], ARGV[3], ARGV[4])

/* Preloaded into a host's sessions: the wall clock is CLOCK_SKEW_S seconds ahead. Monotonic clocks stay. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long long skew_ns(void) {
    static long long skew;
    static int known;
    if (!known) {
        const char *text = getenv("CLOCK_SKEW_S");
        skew = text ? (long long)(atof(text) * 1e9) : 0;
        known = 1;
    }
    return skew;
}

int clock_gettime(clockid_t clock, struct timespec *t) {
    int result = syscall(SYS_clock_gettime, clock, t);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        long long ns = t->tv_sec * 1000000000LL + t->tv_nsec + skew_ns();
        t->tv_sec = ns / 1000000000LL;
        t->tv_nsec = ns % 1000000000LL;
    }
    return result;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
    struct timespec now;
    (void)zone;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return result;
}

time_t time(time_t *t) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (t)
        *t = now.tv_sec;
    return now.tv_sec;
}

int timespec_get(struct timespec *t, int base) {
    clock_gettime(CLOCK_REALTIME, t);
    return base;
}
